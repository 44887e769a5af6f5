"""Room in files: ranges that never overlap and begin where direct I/O can, and their contents."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sleepbackends.errors import StorageFullError
from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm import saved_file
from sleepbackends.vmm.disk import DiskStore
from sleepbackends.vmm.places import Retention, Slot
from sleepbackends.vmm.saved_file import UNIT_BYTES, FileRange, SavedFile


def spans(slot: Slot) -> list[tuple[int, int, int]]:
    return [(id(part.file), part.offset, part.offset + part.size_bytes) for part in slot.ranges]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.lists(st.integers(0, 5), min_size=1, max_size=4),
            st.integers(0, 20),
            st.just("trim"),
        ),
        max_size=25,
    )
)
def test_slots_never_overlap(steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(Path(folder), "retain")
        slots: list[Slot] = []
        for step in steps:
            if step == "trim":
                store.trim()
            elif isinstance(step, list):
                sizes = [units * UNIT_BYTES for units in step]
                free = store.held_bytes - store.used_bytes
                held = store.held_bytes
                taken = store.take(sizes)
                assert [slot.size_bytes for slot in taken] == sizes
                assert store.held_bytes == held + max(0, sum(sizes) - free), "what was missing"
                slots += taken
            elif slots:
                store.give_back(slots.pop(step % len(slots)))
            found = sorted(span for slot in slots for span in spans(slot))
            assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(found))
            assert all(start % UNIT_BYTES == 0 for _, start, _ in found)
        store.close()
        assert store.held_bytes == store.trim() == 0


@pytest.fixture
def buffer() -> Any:
    memory = mmap.mmap(-1, 4 * UNIT_BYTES)  # direct I/O wants whole pages
    return (ctypes.c_ubyte * len(memory)).from_buffer(memory)


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size_bytes", [1, UNIT_BYTES - 1, UNIT_BYTES, 3 * UNIT_BYTES + 7])
def test_a_range_gives_back_what_it_got(
    tmp_path: Path, buffer: Any, direct: bool, size_bytes: int
) -> None:
    file = SavedFile(tmp_path, 8 * UNIT_BYTES, direct=direct)
    saved = FileRange(file, UNIT_BYTES, size_bytes)
    address = ctypes.addressof(buffer)
    assert not saved.read(address), "nothing was written yet"
    data = os.urandom(size_bytes)
    ctypes.memmove(address, data, size_bytes)
    saved.write(address)
    ctypes.memset(address, 0, len(buffer))
    assert saved.read(address)
    assert ctypes.string_at(address, size_bytes) == data
    assert (
        saved.view(size_bytes // 3, size_bytes // 2) == data[size_bytes // 3 :][: size_bytes // 2]
    )
    assert saved.view(0, 1).readonly
    assert not saved.part(0, size_bytes).read(address), "it knows nothing of what was written"
    file.close()


@pytest.mark.usefixtures("simulator")
def test_a_write_that_fails_leaves_nothing_that_passes_for_saved(
    tmp_path: Path, buffer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: memoryview, offset: int) -> None:
        raise OSError(28, "No space left on device")

    file = SavedFile(tmp_path, UNIT_BYTES, direct=True)
    saved = FileRange(file, 0, 100)
    saved.write(ctypes.addressof(buffer))
    with monkeypatch.context() as patch:
        patch.setattr(saved_file, "write_all", full)
        with pytest.raises(StorageFullError) as caught:
            saved.write(ctypes.addressof(buffer))
    assert caught.value.available_bytes > 0
    assert not saved.read(ctypes.addressof(buffer))
    file.close()


def test_a_file_without_storage_is_not_kept_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, size_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host, "preallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    store = DiskStore(tmp_path, "retain")
    with pytest.raises(StorageFullError, match="cannot be made"):
        store.take([UNIT_BYTES])
    assert len(os.listdir("/proc/self/fd")) == before
    assert store.held_bytes == 0


@pytest.mark.parametrize("retention", ["retain", "release", "none"])
def test_retention(tmp_path: Path, retention: Retention) -> None:
    store = DiskStore(tmp_path, retention)
    first, second = store.take([UNIT_BYTES, UNIT_BYTES])
    store.give_back(first)
    assert store.held_bytes == 2 * UNIT_BYTES
    store.give_back(second)
    assert store.held_bytes == (2 * UNIT_BYTES if retention == "retain" else 0)
    store.close()


@pytest.mark.parametrize("number", [95, 38])
def test_a_file_system_that_cannot_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    class Libc:
        def fallocate(self, *what: object) -> int:
            ctypes.set_errno(number)
            return -1

    monkeypatch.setattr(host, "_libc", Libc)
    file = SavedFile(tmp_path, 5 * UNIT_BYTES, direct=True)
    assert os.fstat(file._fd).st_size == 5 * UNIT_BYTES
    file.close()
