"""Raw memory of the cumem backend: layout, devices, neighbours, closing, checks."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from sleepbackends.control import Control
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.errors import (
    ClosedError,
    ContentsLostError,
    DeviceMemoryError,
    MechanismError,
    RequestError,
    TransitionTimeoutError,
)
from sleepbackends.ledger import Block
from sleepbackends.mechanism import Fill
from sleepbackends.residency import Residency
from sleepbackends.settings import BackendSettings
from sleepbackends.vmm import mover
from sleepbackends.vmm.region import DeviceMemory
from tests.native.fixtures import DEVICES, GRANULE_BYTES
from tests.simulators.cuda import Simulator

Make = Callable[..., CumemBackend]

# They count bytes of the device to the last one.
pytestmark = pytest.mark.usefixtures("no_fingerprints")


@pytest.fixture
def make(simulator: Simulator) -> Iterator[Make]:
    made = []

    def make(settings: BackendSettings | None = None, **options: object) -> CumemBackend:
        made.append(CumemBackend(CumemOptions.model_validate(options), settings))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
    usage = simulator.process_usage()
    assert usage.pinned_bytes == usage.live_streams == usage.live_events == 0


def filled(
    backend: CumemBackend, tag: str, size_bytes: int, byte: int, device: int = 0
) -> DeviceMemory:
    with backend.region(tag, device) as region:
        memory = region.buffer(size_bytes)
    memory.write(bytes([byte]) * size_bytes)
    return memory


def holds(memory: DeviceMemory, byte: int) -> bool:
    return memory.read() == bytes([byte]) * memory.size_bytes


def test_small_pieces_of_a_tag_share_handles(simulator: Simulator, make: Make) -> None:
    backend = make()
    pieces = [filled(backend, "weights", GRANULE_BYTES // 2, i) for i in range(64)]
    other = filled(backend, "kv_cache", 100, 99)
    assert len(simulator.handles()) < 25
    state = backend.state()
    assert state.tags["weights"].resident_bytes == 64 * GRANULE_BYTES // 2
    assert state.tags["kv_cache"].resident_bytes == 100
    report = backend.suspend(1)
    assert report.copied_bytes == 64 * GRANULE_BYTES // 2
    assert simulator.device_usage().used_bytes == 0
    backend.resume()
    assert all(holds(piece, i) for i, piece in enumerate(pieces))
    assert holds(other, 0)


def test_pieces_freed_asleep_leave_the_rest_alone(simulator: Simulator, make: Make) -> None:
    backend = make()
    pieces = [filled(backend, "weights", 1000 + i, i) for i in range(40)]
    backend.suspend(1)
    for piece in pieces[::2]:
        piece.free()
    expected = sum(piece.size_bytes for piece in pieces[1::2])
    assert backend.state().tags["weights"].offloaded_bytes == expected
    filled(backend, "weights", 1000, 77)
    backend.resume()
    assert all(holds(piece, 2 * i + 1) for i, piece in enumerate(pieces[1::2]))
    for piece in pieces[1::2]:
        piece.free()
    assert backend.state().tags["weights"].resident_bytes == 1000


def test_blocks_freed_asleep_give_their_pinned_memory_back(make: Make) -> None:
    backend = make(share_below_bytes=0)
    pieces = [filled(backend, "weights", GRANULE_BYTES, i) for i in range(4)]
    backend.suspend(1)
    assert backend._store.used_bytes == 4 * GRANULE_BYTES
    for piece in pieces:
        piece.free()
    assert backend._store.used_bytes == 0
    assert backend.trim() == 4 * GRANULE_BYTES
    assert backend.trim() == 0


def test_two_devices_sleep_apart(simulator: Simulator, make: Make) -> None:
    backend = make()
    memory = [filled(backend, f"tag{d}", 5 * GRANULE_BYTES, d + 1, d) for d in range(DEVICES)]
    backend.suspend(1)
    backend.resume(["tag1"])
    assert simulator.device_usage(0).used_bytes == 0
    assert simulator.device_usage(1).used_bytes == 5 * GRANULE_BYTES
    assert holds(memory[1], 2)
    backend.resume()
    assert holds(memory[0], 1)


def test_a_device_that_is_not_used_gets_no_context(simulator: Simulator, make: Make) -> None:
    backend = make()
    filled(backend, "weights", 100, 1, device=1)
    backend.suspend(1)
    backend.resume()
    assert simulator.device_usage(0).context_references == 0


def test_two_backends_do_not_meet(make: Make) -> None:
    first, second = make(), make()
    one, two = filled(first, "weights", 5000, 1), filled(second, "weights", 6000, 2)
    assert first.is_managed(one.address)
    assert not first.is_managed(two.address)
    first.suspend(1)
    assert second.state().tags["weights"].resident_bytes == 6000
    assert holds(two, 2)
    second.close()
    first.resume()
    assert holds(one, 1)
    assert holds(two, 2), "closing leaves mapped memory usable"


def test_after_close(simulator: Simulator, make: Make) -> None:
    backend = make()
    awake = filled(backend, "awake", 5000, 1)
    asleep = filled(backend, "asleep", 5000, 2)
    backend.discard(["asleep"])
    backend.close()
    assert holds(awake, 1)
    with pytest.raises(ClosedError), backend.region("awake"):
        pytest.fail("a closed backend opened a region")
    with pytest.raises(ClosedError):
        backend.allocate("awake", 1)
    for memory in (awake, asleep):
        memory.free()
    assert simulator.process_usage().reserved_bytes == 0
    assert simulator.device_usage().live_handles == 0


@pytest.mark.parametrize(("size_bytes", "device"), [(0, 0), (-1, 0), (1, DEVICES), (1, -1)])
def test_requests_that_make_no_sense(make: Make, size_bytes: int, device: int) -> None:
    backend = make()
    with pytest.raises(RequestError):
        backend.allocate("weights", size_bytes, device)
    assert backend.state().mapped_bytes == 0


@pytest.mark.parametrize("size_bytes", [9 << 30, (1 << 63) - 1])
def test_more_than_there_is(simulator: Simulator, make: Make, size_bytes: int) -> None:
    backend = make()
    with pytest.raises(DeviceMemoryError) as caught:
        backend.allocate("weights", size_bytes)
    assert caught.value.needed_bytes == size_bytes
    assert caught.value.available_bytes == 8 << 30
    assert simulator.process_usage().reserved_bytes == 0
    assert holds(filled(backend, "weights", 100, 3), 3)


@pytest.mark.parametrize("fill", list(Fill))
def test_fill_covers_what_is_allocated_later_too(make: Make, fill: Fill) -> None:
    backend = make(BackendSettings(fill=fill))
    memory = filled(backend, "kv_cache", 3 * GRANULE_BYTES, 1)
    backend.suspend(1)
    backend.resume()
    expected = {Fill.ZERO: 0, Fill.POISON: 0xA5, Fill.NONE: 0xD7}[fill]
    assert holds(memory, expected)


def test_a_deadline_in_the_middle(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "GROUP_BYTES", {"down": 1, "up": 1})
    backend = make(share_below_bytes=0)
    memory = [filled(backend, "weights", GRANULE_BYTES, i) for i in range(6)]

    class Third(Control):
        def remaining_s(self) -> float | None:
            return 0.0 if self.progress.done_bytes >= 3 * GRANULE_BYTES else 3600.0

    for call in (lambda c: backend.suspend(1, control=c), lambda c: backend.resume(control=c)):
        before = backend.state()
        with pytest.raises(TransitionTimeoutError):
            call(Third(timeout_s=3600.0))
        assert backend.state() == before
        backend.suspend(1)
    backend.resume()
    assert all(holds(each, i) for i, each in enumerate(memory))


def test_damaged_host_copies_are_found(make: Make) -> None:
    backend = make(verify="resume", share_below_bytes=0)
    good, bad = filled(backend, "weights", 5000, 1), filled(backend, "lora", 5000, 2)
    backend.suspend(1)
    view = backend.host_copy(bad.address, 5000)
    assert bytes(view) == bytes([2]) * 5000
    ctypes.memset(ctypes.addressof(view.obj) + 17, 0xEE, 1)  # type: ignore[arg-type]
    del view
    with pytest.raises(ContentsLostError) as caught:
        backend.resume()
    assert caught.value.addresses == {bad.address}
    assert caught.value.tags == {"lora"}
    assert backend.state().tags["lora"].residencies == {Residency.DISCARDED}
    backend.resume()
    assert holds(good, 1)
    assert holds(bad, 0)


def test_bytes_that_did_not_arrive_are_found(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make(verify="resume")
    memory = filled(backend, "weights", 5000, 1)
    backend.suspend(1)
    lane = type(backend.cuda.lane(0, "copy"))
    with monkeypatch.context() as patch:
        patch.setattr(lane, "copy_all", lambda _, direction, copies: list(copies))
        with pytest.raises(MechanismError, match="other bytes"):
            backend.resume()
    assert backend.state().tags["weights"].residencies == {Residency.OFFLOADED}
    backend.resume()
    assert holds(memory, 1)


def test_freeing_during_a_suspend(simulator: Simulator, make: Make) -> None:
    backend = make(share_below_bytes=0)
    kept, freed = filled(backend, "weights", 5000, 1), filled(backend, "weights", 5000, 2)
    real = backend.unmap_all

    def unmap(blocks: Sequence[Block], done: list[Block]) -> None:
        thread = threading.Thread(target=freed.free)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "freeing waits for a transition"
        real(blocks, done)

    backend.unmap_all = unmap  # type: ignore[method-assign]
    backend.suspend(1)
    assert backend.state().tags["weights"].offloaded_bytes == 5000
    assert simulator.process_usage().reserved_bytes == GRANULE_BYTES
    backend.resume()
    assert holds(kept, 1)


def test_memory_that_could_not_be_given_back_is_nobodys(simulator: Simulator, make: Make) -> None:
    backend = make()
    memory = filled(backend, "weights", 5000, 1)
    simulator.fail("cuMemUnmap", 1)
    memory.free()
    assert backend.state().tags["weights"].blocks == 0
    assert not backend.suspend(1).changed
    assert simulator.device_usage().live_handles == 0, "tried again by the next call"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_frees_and_ends(make: Make) -> None:
    backend = make()
    memory = filled(backend, "weights", 5000, 1)
    child = os.fork()
    if not child:
        memory.free()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert holds(memory, 1)
