"""Extents: layout, sharing, what is held back while a transition goes on."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sleepbackends.cumem.driver import LIBRARY, CudaDriver
from sleepbackends.errors import BackendUnavailableError, MechanismError
from sleepbackends.vmm.address_space import AddressSpace, library_path
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.cuda import Simulator
from tests.simulators.cuda.driving import MIB, HostBuffer

SHARED = 8 * GRANULE_BYTES


def make_space(share_below_bytes: int = SHARED) -> AddressSpace:
    return AddressSpace(library_path("cuda"), LIBRARY, CudaDriver(), share_below_bytes)


def test_a_driver_that_is_not_there(simulator: Simulator) -> None:
    with pytest.raises(BackendUnavailableError, match="libcuda-of-nobody"):
        AddressSpace(library_path("cuda"), "libcuda-of-nobody.so", CudaDriver())


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.integers(1, 2 * SHARED)),
        st.integers(0, 30),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(_STEPS)
def test_pieces_never_overlap_and_extents_follow(
    simulator: Simulator, steps: list[tuple[str, int, int] | int]
) -> None:
    space = make_space()
    live: dict[int, tuple[str, int, int]] = {}
    for step in steps:
        if isinstance(step, tuple):
            tag, device, size = step
            live[space.allocate(tag, size, device)] = step
        elif live:
            address = list(live)[step % len(live)]
            del live[address]
            space.free(address)
        extents = space.extents()
        ranges = {
            (extent.address + offset, size): extent
            for extent in extents
            for offset, size in space.live_ranges(extent.id)
        }
        for address, (tag, device, size) in live.items():
            inside = [
                extent
                for (start, length), extent in ranges.items()
                if start <= address and address + size <= start + length
            ]
            assert [(each.tag, each.device) for each in inside] == [(tag, device)]
            assert address % GRANULE_BYTES == 0
        ends = sorted((address, address + size) for address, (_, _, size) in live.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert sum(e.live_bytes for e in extents) == sum(size for _, _, size in live.values())
        assert all(extent.live_bytes for extent in extents), "an empty extent is deleted"
    for address in live:
        space.free(address)
    assert not space.extents()
    assert simulator.process_usage().reserved_bytes == 0


def test_a_busy_space_keeps_its_extents(simulator: Simulator) -> None:
    space = make_space()
    first = space.allocate("a", 100, 0)
    space.free(space.allocate("a", 100, 0))
    (old,) = [e for e in space.extents() if e.live_bytes]
    space.begin()
    new = space.allocate("a", 100, 0)
    space.free(first)
    extents = {e.id: e for e in space.extents()}
    assert extents[old.id].live_bytes == 0, "freed, but still there"
    assert len(extents) == 2, "what is moved gains no piece"
    another = space.allocate("a", 100, 0)
    space.end()
    assert old.id not in {e.id for e in space.extents()}
    for address in (new, another):
        space.free(address)
    assert not space.extents()


def test_steps_in_the_wrong_state_are_refused(simulator: Simulator) -> None:
    space = make_space()
    space.allocate("a", 100, 0)
    (extent,) = space.extents()
    space.begin()
    reached: list[int] = []
    for step in (space.map, space.release, space.create):
        with pytest.raises(MechanismError, match="not in the state"):
            step([extent], reached.append)
    space.unmap([extent], reached.append)
    for step in (space.map, space.unmap):
        with pytest.raises(MechanismError, match="not in the state"):
            step([extent], reached.append)
    space.create([extent, extent], reached.append)
    assert simulator.device_usage().live_handles == 1
    space.release([extent, extent], reached.append)
    assert simulator.device_usage().live_handles == 0
    with pytest.raises(MechanismError, match="freed meanwhile"):
        space.map([replace(extent, id=extent.id + 1000)], reached.append)
    assert reached == [0, 0, 0, 1, 0, 0, 2, 2, 0]
    space.end()


def test_what_cannot_be_given_back_is_tried_again(simulator: Simulator) -> None:
    for function in ("cuMemUnmap", "cuMemRelease", "cuMemAddressFree", "cuCtxSynchronize"):
        space = make_space()
        address = space.allocate("a", 100, 0)
        simulator.fail(function, 1)
        space.free(address)
        assert len(space.extents()) == 1
        space.begin()
        space.end()
        assert not space.extents(), function
        assert simulator.process_usage().reserved_bytes == 0


@pytest.mark.parametrize("function", ["cuMemAddressReserve", "cuMemCreate", "cuMemMap"])
def test_a_failed_allocation_leaves_nothing(simulator: Simulator, function: str) -> None:
    space = make_space()
    simulator.fail(function, 1, times=2)  # the second try is for less
    with pytest.raises(MechanismError, match="INVALID_VALUE"):
        space.allocate("a", 100, 0)
    assert not space.extents()
    assert simulator.process_usage().reserved_bytes == 0
    assert simulator.device_usage().live_handles == 0


def test_scopes_nest_and_belong_to_their_thread(simulator: Simulator) -> None:
    space, other = make_space(), make_space()
    found = []
    with space.allocating("a"), other.allocating("b"):
        thread = threading.Thread(target=lambda: found.append(space.allocate("c", 1, 0)))
        thread.start()
        thread.join()
        with space.allocating("a"):
            pass
        other.allocate("d", 1, 0)
    assert [extent.tag for extent in space.extents()] == ["c"]
    assert [extent.tag for extent in other.extents()] == ["d"]
    assert len(found) == 1


def test_waiting_for_kernels_does_not_stop_others(simulator: Simulator) -> None:
    """A kernel may wait for work that another thread queues after it has allocated."""
    driver = CudaDriver()
    space = AddressSpace(library_path("cuda"), LIBRARY, driver, SHARED)
    freed, source = space.allocate("a", 100, 0), space.allocate("b", MIB, 0)
    other = space.allocate("c", 100, 1)
    buffer, lane = HostBuffer(MIB), driver.lane(0, "copy")
    driver.pin(buffer.address, MIB)
    simulator.set_copy_rate(2 * MIB)
    lane.to_host(buffer.address, source, MIB)
    thread = threading.Thread(target=space.free, args=(freed,))
    thread.start()
    time.sleep(0.05)
    space.free(space.allocate("d", 100, 1))
    assert thread.is_alive(), "this test measures nothing: the free did not wait"
    thread.join(30)
    for address in (source, other):
        space.free(address)
    assert not space.extents()
    driver.unpin(buffer.address)
    driver.close()
