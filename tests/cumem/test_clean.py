"""What was saved already is not copied again, and nothing else is taken for it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.errors import HostMemoryError, MechanismError, PolicyConflictError, RequestError
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.residency import Residency
from sleepbackends.testing import FaultInjector
from sleepbackends.vmm import copies, saving
from sleepbackends.vmm.region import DeviceMemory
from sleepbackends.vmm.segment import Range
from tests.cumem.test_backend import Make, filled, holds, make
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.cuda import Simulator

__all__ = ["make"]

CHUNK = GRANULE_BYTES
KEEP = TagPolicy(Policy.KEEP, Policy.KEEP)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "CHUNK_BYTES", CHUNK)


def slept_once(backend: CumemBackend, chunks: int = 8) -> DeviceMemory:
    memory = filled(backend, "weights", chunks * CHUNK, 1)
    assert backend.suspend(1).copied_bytes == chunks * CHUNK
    backend.resume()
    return memory


def saved_at(backend: CumemBackend) -> int:
    (block,) = backend.ledger.blocks()
    saved = backend._copies[block].chunks[0].saved
    assert isinstance(saved, Range)
    return saved.address


def change(memory: DeviceMemory, offset: int) -> bytes:
    """Flip one bit, and return what the memory holds now."""
    ctypes.c_ubyte.from_address(memory.address + offset).value ^= 0x10
    return memory.read()


def test_what_did_not_change_is_not_copied(simulator: Simulator, make: Make) -> None:
    backend = make()
    memory = slept_once(backend)
    tables = simulator.device_usage().used_bytes - 8 * CHUNK
    for _ in range(3):
        ctypes.memset(saved_at(backend), 9, 1)  # it would be gone if this were copied again
        report = backend.suspend(1)
        assert (report.copied_bytes, report.clean_bytes) == (0, 8 * CHUNK)
        assert report.changed
        assert report.released_bytes == 8 * CHUNK
        assert simulator.device_usage().used_bytes == tables
        backend.resume()
        assert memory.read() == bytes([9]) + bytes([1]) * (8 * CHUNK - 1)
        ctypes.memset(saved_at(backend), 1, 1)
        ctypes.memset(memory.address, 1, 1)


def test_no_kernel_is_launched_once_clean_memory_is_being_unmapped(
    simulator: Simulator, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver takes longer for both together."""
    monkeypatch.setattr(saving, "BATCH_BYTES", CHUNK)
    monkeypatch.setattr(saving, "CLEAN_BATCH_BYTES", 4 * CHUNK)
    backend = make(share_below_bytes=0)
    for number in range(16):
        filled(backend, "weights", CHUNK, number)
    launches: list[int] = []
    unmap = backend._space.unmap

    def watched(*args: Any) -> None:
        launches.append(simulator.calls("cuLaunchKernel"))
        unmap(*args)

    backend.suspend(1)
    backend.resume()
    monkeypatch.setattr(backend._space, "unmap", watched)
    assert backend.suspend(1).clean_bytes == 16 * CHUNK
    assert len(launches) == 6
    assert len(set(launches)) == 1
    backend.resume()


@pytest.mark.parametrize("offset", [0, 3 * CHUNK - 1, 3 * CHUNK, 8 * CHUNK - 1])
def test_one_bit_is_seen(make: Make, offset: int) -> None:
    backend = make(verify="resume")
    memory = slept_once(backend)
    expected = change(memory, offset)
    report = backend.suspend(1)
    assert (report.copied_bytes, report.clean_bytes) == (CHUNK, 7 * CHUNK)
    backend.resume()
    assert memory.read() == expected
    assert backend.suspend(1).clean_bytes == 8 * CHUNK
    backend.resume()
    assert memory.read() == expected


def test_chunks_that_changed_places_are_seen(make: Make) -> None:
    backend = make()
    memory = filled(backend, "weights", 2 * CHUNK, 1)
    memory.write(bytes([1]) * CHUNK + bytes([2]) * CHUNK)
    backend.suspend(1)
    backend.resume()
    memory.write(bytes([2]) * CHUNK + bytes([1]) * CHUNK)
    assert backend.suspend(1).copied_bytes == 2 * CHUNK
    backend.resume()
    assert memory.read() == bytes([2]) * CHUNK + bytes([1]) * CHUNK


def test_memory_that_came_or_went_is_saved_anew(make: Make) -> None:
    """The same bytes, mostly at the same place, and yet other memory."""
    backend = make()
    pieces = [filled(backend, "weights", CHUNK, i) for i in range(4)]
    backend.suspend(1)
    backend.resume()
    before = {extent.id: extent for extent in backend._space.extents()}
    pieces[1].free()
    pieces[1] = filled(backend, "weights", CHUNK, 1)
    report = backend.suspend(1)
    same = [e for e in backend._space.extents() if before.get(e.id) == e]
    assert report.clean_bytes == sum(extent.live_bytes for extent in same)
    assert report.copied_bytes == 4 * CHUNK - report.clean_bytes >= CHUNK
    backend.resume()
    assert all(holds(piece, i) for i, piece in enumerate(pieces))


@pytest.mark.parametrize("retention", ["release", "none"])
def test_where_nothing_is_retained_everything_is_copied(make: Make, retention: str) -> None:
    backend = make(retention=retention)
    memory = slept_once(backend)
    assert backend._store.used_bytes == 0
    assert backend.suspend(1).copied_bytes == 8 * CHUNK
    backend.resume()
    assert holds(memory, 1)


def test_without_fingerprints_everything_is_copied(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make(verify="resume")
    monkeypatch.setattr(backend.cuda, "fingerprint", lambda *_: None)
    memory = slept_once(backend)
    report = backend.suspend(1)
    assert (report.copied_bytes, report.clean_bytes) == (8 * CHUNK, 0)
    backend.resume()
    assert holds(memory, 1)


@pytest.mark.parametrize("landed", range(8))
def test_a_chunk_that_was_being_overwritten_is_not_clean(make: Make, landed: int) -> None:
    """A suspend that fails leaves copies half old and half new."""
    backend = make(share_below_bytes=0)
    memory = [filled(backend, "weights", CHUNK, i) for i in range(8)]
    backend.suspend(1)
    backend.resume()
    for i, each in enumerate(memory):
        each.write(bytes([100 + i]) * CHUNK)
    with FaultInjector(backend, {"save": [landed]}), pytest.raises(MechanismError):
        backend.suspend(1)
    for i, each in enumerate(memory):
        each.write(bytes([i]) * CHUNK)
    backend.suspend(1)
    backend.resume()
    assert all(holds(each, i) for i, each in enumerate(memory))


def test_a_failed_fingerprint_changes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def result(self) -> list[int]:
            raise MechanismError("the device is lost")

    backend = make()
    memory = slept_once(backend)
    with monkeypatch.context() as patch:
        patch.setattr(backend.cuda, "fingerprint", lambda *_: Lost())
        with pytest.raises(MechanismError, match="lost"):
            backend.suspend(1)
    assert backend.state().tags["weights"].residencies == {Residency.RESIDENT}
    expected = change(memory, 5)
    backend.suspend(1)
    backend.resume()
    assert memory.read() == expected


def test_a_copy_that_nobody_needs_makes_room(make: Make) -> None:
    backend = make(host_budget_bytes=3 * CHUNK)
    first, second = filled(backend, "weights", 3 * CHUNK, 1), filled(backend, "lora", 3 * CHUNK, 2)
    for tag, other in (("weights", "lora"), ("lora", "weights"), ("weights", "lora")):
        report = backend.suspend(1, policies=Policies({other: KEEP}))
        assert report.copied_bytes == 3 * CHUNK, "what made room is not taken for saved"
        backend.resume([tag])
    assert holds(first, 1)
    assert holds(second, 2)
    with pytest.raises(HostMemoryError):
        backend.suspend(1)
    assert backend.state().asleep_bytes == 0


def test_trim_gives_copies_back_that_nothing_needs(make: Make) -> None:
    backend = make()
    awake, asleep = slept_once(backend), filled(backend, "lora", 2 * CHUNK, 2)
    backend.suspend(1, policies=Policies({"weights": KEEP}))
    backend.trim()
    assert backend._store.used_bytes == 2 * CHUNK
    backend.resume()
    assert holds(asleep, 2)
    report = backend.suspend(1)
    assert (report.copied_bytes, report.clean_bytes) == (8 * CHUNK, 2 * CHUNK)
    backend.resume()
    assert holds(awake, 1)


@pytest.fixture
def asleep(make: Make) -> Iterator[tuple[CumemBackend, DeviceMemory]]:
    backend = make()
    memory = filled(backend, "weights", 3 * CHUNK, 0)
    memory.write(bytes(range(256)) * (3 * CHUNK // 256))
    backend.suspend(1)
    yield backend, memory
    backend.close()


def test_saved_bytes_can_be_read(asleep: tuple[CumemBackend, DeviceMemory]) -> None:
    backend, memory = asleep
    view = backend.host_copy(memory.address + CHUNK - 256, CHUNK)
    assert bytes(view) == bytes(range(256)) * (CHUNK // 256)
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(RequestError, match="not all"):
        backend.host_copy(memory.address, 3 * CHUNK + 1)
    with pytest.raises(RequestError, match="not in memory"):
        backend.host_copy(12, 1)
    backend.resume()
    with pytest.raises(PolicyConflictError, match="resident"):
        backend.host_copy(memory.address, 1)


def test_a_view_outlives_the_backend(asleep: tuple[CumemBackend, DeviceMemory]) -> None:
    backend, memory = asleep
    view = backend.host_copy(memory.address, 256)
    backend.resume()
    backend.trim()
    backend.close()
    assert bytes(view) == bytes(range(256))
    del view
    backend._store.close()


def test_saved_bytes_in_several_places_are_joined(make: Make) -> None:
    backend = make(share_below_bytes=0)
    small = [filled(backend, "other", CHUNK, 9) for _ in range(4)]
    backend.suspend(1)
    for each in small[::2]:
        each.free()
    backend.resume()
    memory = filled(backend, "weights", 3 * CHUNK, 0)
    memory.write(bytes(range(256)) * (3 * CHUNK // 256))
    backend.suspend(1)
    assert bytes(backend.host_copy(memory.address, 3 * CHUNK)) == memory_bytes()


def memory_bytes() -> bytes:
    return bytes(range(256)) * (3 * CHUNK // 256)
