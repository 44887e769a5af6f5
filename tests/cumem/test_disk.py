"""Saved bytes on a disk: what comes back, what is not written again, and nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.errors import (
    StorageError,
)
from sleepbackends.hostmemory.files import write_all
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.vmm import places, saved_file
from tests.cumem.test_backend import Make, filled, holds, make
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.cuda import Simulator

__all__ = ["make"]

CHUNK = GRANULE_BYTES
KEPT = TagPolicy(Policy.OFFLOAD, Policy.OFFLOAD)
ALL_KEPT = Policies({"weights": KEPT, "kv_cache": KEPT})


@pytest.fixture
def on_disk(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Backends with a directory of their own and small buffers."""
    monkeypatch.setattr(places, "BUFFER_BYTES", CHUNK)

    def made(**options: object) -> CumemBackend:
        return make(tier="disk", disk_directory=tmp_path / "saved", share_below_bytes=0, **options)

    return made


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all writes."""
    sizes: list[int] = []
    real = write_all

    def count(fd: int, data: memoryview, offset: int) -> None:
        sizes.append(len(data))
        real(fd, data, offset)

    monkeypatch.setattr(saved_file, "write_all", count)
    return sizes


def open_files(below: Path) -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(link))
        except FileNotFoundError:
            continue  # what listed them
    return [name for name in found if name.startswith(str(below))]


@pytest.mark.parametrize("options", [{}, {"verify": "resume", "retention": "none"}])
def test_what_comes_back_is_what_was_saved(
    simulator: Simulator, on_disk: Make, options: dict[str, object], tmp_path: Path
) -> None:
    backend = on_disk(**options)
    memory = [filled(backend, "weights", 10 * CHUNK + 77, 1 + i, i % 2) for i in range(4)]
    small = filled(backend, "weights", 5, 9)
    for _ in range(3):
        backend.suspend(1)
        assert simulator.device_usage().used_bytes < CHUNK * 20
        assert not list((tmp_path / "saved").iterdir()), "a crash would leave nothing"
        assert backend.host_copy(memory[1].address + 5, 3 * CHUNK) == bytes([2]) * 3 * CHUNK
        backend.resume()
        assert all(holds(each, 1 + i) for i, each in enumerate(memory))
        assert holds(small, 9)
    kept = backend._store.held_bytes
    assert bool(kept) == (not options)
    assert bool(backend._ring.held_bytes) == (not options)
    backend.trim()
    assert backend._store.held_bytes == backend._ring.held_bytes == 0


def test_nothing_is_left(simulator: Simulator, on_disk: Make, tmp_path: Path) -> None:
    backend = on_disk()
    memory = filled(backend, "weights", 10 * CHUNK, 1)
    backend.suspend(1)
    saved = tmp_path / "saved"
    assert len(open_files(saved)) == 1
    blocks = sum(os.fstat(each._fd).st_blocks for each in files(backend))
    assert blocks * 512 >= 10 * CHUNK
    backend.close()
    assert not open_files(saved)
    assert simulator.process_usage().pinned_bytes == 0
    memory.free()


def files(backend: CumemBackend) -> list[Any]:
    store: Any = backend._store
    return list(store._files)


def test_what_did_not_change_is_not_written(on_disk: Make, written: list[int]) -> None:
    backend = on_disk()
    memory = filled(backend, "weights", 8 * CHUNK, 1)
    backend.suspend(1)
    assert sum(written) == 8 * CHUNK
    backend.resume()
    written.clear()
    report = backend.suspend(1)
    assert (report.clean_bytes, sum(written)) == (8 * CHUNK, 0)
    backend.resume()
    memory.write(bytes([2]) * CHUNK + bytes([1]) * 7 * CHUNK)
    backend.suspend(1)
    assert written == [CHUNK]
    backend.resume()
    assert memory.read() == bytes([2]) * CHUNK + bytes([1]) * 7 * CHUNK
    assert len(files(backend)) == 1, "its space was used again"


def test_staged_bytes_are_not_written_again(on_disk: Make, written: list[int]) -> None:
    backend = on_disk()
    memory = filled(backend, "weights", 8 * CHUNK, 1)
    assert backend.stage(background=False).wait().copied_bytes == 8 * CHUNK
    written.clear()
    assert backend.suspend(1).copied_bytes == 0
    assert not written
    backend.resume()
    assert holds(memory, 1)


@pytest.mark.parametrize("when", ["opened", "used"])
def test_direct_io_is_refused(
    on_disk: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    real_fcntl, real_write = fcntl.fcntl, write_all

    def no_flag(fd: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_fcntl(fd, command, value)

    def no_write(fd: int, data: memoryview, offset: int) -> None:
        if real_fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        real_write(fd, data, offset)

    if when == "opened":
        monkeypatch.setattr(fcntl, "fcntl", no_flag)
    else:
        monkeypatch.setattr(saved_file, "write_all", no_write)
        monkeypatch.setattr("sleepbackends.vmm.ring.BUFFERS", 1)
    backend = on_disk()
    memory = filled(backend, "weights", 4 * CHUNK, 1)
    backend.suspend(1)
    backend.resume()
    filled(backend, "weights", 4 * CHUNK, 2)  # needs one more file
    backend.suspend(1)
    backend.resume()
    assert holds(memory, 1)
    assert len(files(backend)) == 2
    assert caplog.text.count("takes no direct I/O") == 1


def test_without_any_pinned_memory(simulator: Simulator, on_disk: Make) -> None:
    simulator.set_pinned_limit_bytes(0)
    backend = on_disk()
    memory = filled(backend, "weights", 20 * CHUNK, 1)
    backend.suspend(1)
    backend.resume()
    assert holds(memory, 1)


def test_options_without_a_use_and_directories_in_memory_are_refused(make: Make) -> None:
    with pytest.raises(ValidationError, match="tier='disk' only"):
        CumemOptions(disk_directory=Path("/tmp"))  # noqa: S108
    with pytest.raises(ValidationError, match="tier='memory' only"):
        CumemOptions(tier="disk", host_budget_bytes=1)
    if os.access("/dev/shm", os.W_OK):  # noqa: S108
        with pytest.raises(StorageError, match="is memory"):
            make(tier="disk", disk_directory="/dev/shm")  # noqa: S108
