"""The disk tier when something goes wrong: no room, damage, errors of the disk and the driver."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.errors import (
    ContentsLostError,
    MechanismError,
    StorageError,
    StorageFullError,
)
from sleepbackends.hostmemory import driver as host
from sleepbackends.hostmemory.files import write_all
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.residency import Residency
from sleepbackends.vmm import disk, saved_file
from sleepbackends.vmm.fingerprint import host_fingerprint
from tests.cumem.test_backend import Make, filled, holds, make
from tests.cumem.test_disk import CHUNK, files, on_disk
from tests.simulators.cuda import Simulator

__all__ = ["make", "on_disk"]

KEPT = TagPolicy(Policy.OFFLOAD, Policy.OFFLOAD)
ALL_KEPT = Policies({"weights": KEPT, "kv_cache": KEPT})


def reopened(backend: CumemBackend) -> int:
    """Return a descriptor of the first file, as somebody else would have it."""
    store: Any = backend._store
    return os.open(f"/proc/self/fd/{store._files[0]._fd}", os.O_RDWR)


def damage(backend: CumemBackend, offset: int) -> None:
    fd = reopened(backend)
    try:
        (byte,) = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte ^ 1]), offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def test_bytes_that_change_on_their_way_are_noticed(
    on_disk: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = on_disk()
    memory = filled(backend, "weights", 8 * CHUNK, 1)
    real = host_fingerprint
    calls = iter(range(99))

    def other(address: int, size_bytes: int) -> int:
        return real(address, size_bytes) ^ (next(calls) == 3)

    with monkeypatch.context() as patch:
        patch.setattr(saved_file, "host_fingerprint", other)
        with pytest.raises(MechanismError, match="changed on their way"):
            backend.suspend(1)
    assert backend.state().tags["weights"].residencies == {Residency.RESIDENT}
    assert holds(memory, 1)


def test_a_disk_too_small_is_noticed_before_anything_changes(
    simulator: Simulator, on_disk: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = on_disk()
    memory = filled(backend, "weights", 8 * CHUNK, 1)
    before = backend.state()
    with monkeypatch.context() as patch:
        patch.setattr(disk, "available_bytes", lambda directory: 5 * CHUNK)
        with pytest.raises(StorageFullError) as caught:
            backend.suspend(1)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (8 * CHUNK, 5 * CHUNK)
    assert backend.state() == before

    def full(fd: int, size_bytes: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(host, "preallocate", full)
        with pytest.raises(StorageFullError, match="quota"):
            backend.suspend(1)
    assert simulator.calls("cuMemcpyDtoHAsync") == 0, "nothing was copied"
    assert backend.state() == before
    assert not files(backend)
    assert holds(memory, 1)


@pytest.mark.parametrize("nth", [1, 7, 16])
def test_a_disk_that_is_full_half_way(
    on_disk: Make, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    monkeypatch.setattr("sleepbackends.vmm.mover.GROUP_BYTES", {"down": CHUNK, "up": CHUNK})
    monkeypatch.setattr("sleepbackends.vmm.ring.AHEAD", 1)
    monkeypatch.setattr("sleepbackends.vmm.ring.BUFFERS", 2)
    backend = on_disk()
    memory = [filled(backend, "weights", 4 * CHUNK, 1 + i) for i in range(4)]
    real, calls = write_all, iter(range(1, 99))

    def fill_up(fd: int, data: memoryview, offset: int) -> None:
        if next(calls) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(saved_file, "write_all", fill_up)
        with pytest.raises(StorageFullError, match="No space left"):
            backend.suspend(1)
    assert backend.state().tags["weights"].residencies == {Residency.RESIDENT}
    assert all(holds(each, 1 + i) for i, each in enumerate(memory))
    backend.suspend(1)
    backend.resume()
    assert all(holds(each, 1 + i) for i, each in enumerate(memory))


@pytest.mark.parametrize("truncated", [False, True])
def test_damaged_bytes_are_lost_and_never_used(on_disk: Make, truncated: bool) -> None:
    backend = on_disk()
    sound = filled(backend, "kv_cache", CHUNK, 2)
    memory = filled(backend, "weights", 4 * CHUNK, 1)
    backend.suspend(1, policies=ALL_KEPT)
    if truncated:
        fd = reopened(backend)
        os.ftruncate(fd, 3 * CHUNK)
        os.close(fd)
    else:
        damage(backend, 3 * CHUNK + 1234)
    with pytest.raises(ContentsLostError, match="damaged on the disk"):
        backend.host_copy(memory.address, 4 * CHUNK)
    assert backend.host_copy(sound.address, CHUNK) == bytes([2]) * CHUNK
    with pytest.raises(ContentsLostError) as caught:
        backend.resume()
    assert caught.value.tags == {"weights"}
    backend.resume()
    assert backend.state().tags["weights"].residencies == {Residency.UNDEFINED}
    assert holds(sound, 2)


def test_a_disk_that_cannot_be_read_loses_nothing(
    on_disk: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    backend = on_disk()
    memory = filled(backend, "weights", 4 * CHUNK, 1)
    backend.suspend(1)
    asleep = backend.state()
    with monkeypatch.context() as patch:
        patch.setattr(saved_file, "read_into", fail)
        with pytest.raises(StorageError, match="cannot be read: Input/output error"):
            backend.resume()
    assert backend.state() == asleep
    backend.resume()
    assert holds(memory, 1)


@pytest.mark.usefixtures("no_fingerprints")
@pytest.mark.parametrize("nth", [1, 5])
@pytest.mark.parametrize(
    ("function", "down"),
    [
        ("cuMemcpyDtoHAsync", True),
        ("cuMemcpyHtoDAsync", False),
        ("cuEventRecord", True),
        ("cuEventRecord", False),
        ("cuEventSynchronize", False),
    ],
)
def test_a_driver_that_refuses_once(
    simulator: Simulator, on_disk: Make, function: str, down: bool, nth: int
) -> None:
    backend = on_disk(retention="none")
    memory = [filled(backend, "weights", 4 * CHUNK, 1 + i, i % 2) for i in range(4)]
    if not down:
        backend.suspend(1)
    before = backend.state()
    simulator.fail(function, 1, nth=nth)
    with pytest.raises(MechanismError):
        backend.suspend(1) if down else backend.resume()
    assert backend.state() == before
    assert simulator.pending_faults() == 0
    if down:
        backend.suspend(1)
    backend.resume()
    assert all(holds(each, 1 + i) for i, each in enumerate(memory))


def test_the_directory_is_gone(on_disk: Make, tmp_path: Path) -> None:
    backend = on_disk()
    memory = filled(backend, "weights", CHUNK, 1)
    (tmp_path / "saved").rmdir()
    with pytest.raises(StorageError, match="disk_directory"):
        backend.suspend(1)
    assert holds(memory, 1)
