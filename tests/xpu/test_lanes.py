"""Lanes of work, their events, and host memory that was imported."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from sleepbackends.errors import ClosedError, HostMemoryError, MechanismError
from sleepbackends.vmm.address_space import AddressSpace, library_path
from sleepbackends.vmm.driver import DOING
from sleepbackends.xpu.driver import XpuDriver
from sleepbackends.xpu.lanes import POOL_EVENTS
from sleepbackends.xpu.loader import LIBRARY
from tests.simulators.level_zero import Simulator
from tests.xpu.fixtures import INVALID_ARGUMENT, PAGE_BYTES, check_nothing_is_held

SIZE = PAGE_BYTES


class Device:
    """A driver, with memory of its first device and host memory."""

    def __init__(self) -> None:
        self.driver = XpuDriver()
        self.space = AddressSpace(library_path("level_zero"), LIBRARY, self.driver)
        self.address = self.space.allocate("weights", SIZE, 0)
        self._host = (ctypes.c_uint8 * (2 * SIZE))()
        self.host = ctypes.addressof(self._host)

    @property
    def host_bytes(self) -> bytes:
        return bytes(self._host[:SIZE])


@pytest.fixture
def device(simulator: Simulator) -> Iterator[Device]:
    device = Device()
    yield device
    simulator.clear_faults()
    device.driver.close()
    check_nothing_is_held(simulator)


def test_what_is_queued_on_a_lane_happens_in_order(device: Device) -> None:
    """The simulated driver turns around what nothing orders."""
    lane = device.driver.lane(0, "fill")
    for byte in (1, 2, 3):
        lane.fill(device.address, SIZE, byte)
    lane.wait()
    assert device.driver.read(device.address, SIZE, 0) == b"\x03" * SIZE


def test_nothing_is_copied_before_somebody_waits(device: Device) -> None:
    driver = device.driver
    driver.pin(device.host, SIZE)
    driver.write(device.address, b"\x05" * SIZE, 0)
    lane = driver.lane(0, "copy")
    lane.to_host(device.host, device.address, SIZE)
    assert device.host_bytes == bytes(SIZE)
    event = lane.event()
    assert not event.done()
    event.wait()
    assert event.done()
    assert device.host_bytes == b"\x05" * SIZE
    driver.unpin(device.host)


@pytest.mark.parametrize("pinned_bytes", [0, SIZE // 2])
def test_copies_with_memory_that_is_not_pinned_are_made_at_once(
    device: Device, pinned_bytes: int
) -> None:
    if pinned_bytes:
        device.driver.pin(device.host, pinned_bytes)
    device.driver.write(device.address, b"\x05" * SIZE, 0)
    lane = device.driver.lane(0, "copy")
    lane.to_host(device.host, device.address, SIZE)
    assert device.host_bytes == b"\x05" * SIZE
    ctypes.memset(device.host, 6, SIZE)
    lane.to_device(device.address, device.host, SIZE)
    ctypes.memset(device.host, 7, SIZE)
    assert device.driver.read(device.address, SIZE, 0) == b"\x06" * SIZE
    if pinned_bytes:
        device.driver.unpin(device.host)


def test_a_refused_import_is_an_error_and_holds_nothing(
    simulator: Simulator, device: Device
) -> None:
    simulator.fail("zexDriverImportExternalPointer", INVALID_ARGUMENT)
    with pytest.raises(HostMemoryError, match="INVALID_ARGUMENT") as caught:
        device.driver.pin(device.host, SIZE)
    assert caught.value.needed_bytes == SIZE
    assert not device.driver.is_pinned(device.host, 1)
    device.driver.pin(device.host, SIZE)
    simulator.fail("zexDriverReleaseImportedPointer", INVALID_ARGUMENT)
    with pytest.raises(MechanismError):
        device.driver.unpin(device.host)
    assert device.driver.is_pinned(device.host, SIZE), "it still is"
    device.driver.unpin(device.host)


def test_a_driver_that_imports_nothing(simulator: Simulator) -> None:
    simulator.set("imports_exist", 0)
    driver = XpuDriver()
    with pytest.raises(HostMemoryError, match="lacks zexDriverImportExternalPointer"):
        driver.pin(1 << 20, SIZE)
    driver.close()


def test_neighbours_are_not_pinned_as_one(device: Device) -> None:
    driver = device.driver
    driver.pin(device.host, SIZE)
    driver.pin(device.host + SIZE, SIZE)
    assert driver.is_pinned(device.host, SIZE)
    assert driver.is_pinned(device.host + SIZE, SIZE)
    assert not driver.is_pinned(device.host, SIZE + 1)
    assert not driver.is_pinned(device.host - 1, 1)
    assert not driver.is_pinned(device.host + 2 * SIZE, 1)
    driver.unpin(device.host)
    driver.unpin(device.host + SIZE)


def test_events_are_used_again_once_they_have_been_signalled(
    simulator: Simulator, device: Device
) -> None:
    lane = device.driver.lane(0, "copy")
    for _ in range(3 * POOL_EVENTS):
        lane.wait()
    assert simulator.usage("events") == 1
    lane.fill(device.address, SIZE, 1)
    lane.event()  # dropped unread, and its work is not done
    other = lane.event()
    assert simulator.usage("events") == 2
    other.wait()


def test_more_events_than_a_pool_has(simulator: Simulator, device: Device) -> None:
    lane = device.driver.lane(0, "copy")
    events = [lane.event() for _ in range(POOL_EVENTS + 1)]
    assert simulator.usage("pools") == 2
    events[-1].wait()
    assert all(event.done() for event in events)


def test_a_mark_that_the_driver_refuses_can_be_made_again(
    simulator: Simulator, device: Device
) -> None:
    lane = device.driver.lane(0, "copy")
    simulator.fail("zeCommandListAppendBarrier", INVALID_ARGUMENT)
    with pytest.raises(MechanismError, match="INVALID_ARGUMENT"):
        lane.event()
    lane.wait()
    assert simulator.usage("events") == 1


def test_work_of_one_lane_begins_after_an_event_of_another(device: Device) -> None:
    driver = device.driver
    driver.lane(0, "fill").fill(device.address, SIZE, 4)
    filled = driver.lane(0, "fill").event()
    driver.pin(device.host, SIZE)
    lane = driver.lane(0, "copy")
    lane.wait_for(filled)
    lane.to_host(device.host, device.address, SIZE)
    lane.wait()
    assert device.host_bytes == b"\x04" * SIZE
    driver.unpin(device.host)


def test_after_close(device: Device) -> None:
    lane = device.driver.lane(0, "copy")
    event = lane.event()
    event.wait()
    device.driver.close()
    with pytest.raises(ClosedError):
        lane.fill(device.address, SIZE, 1)
    with pytest.raises(ClosedError):
        event.wait()
    lane.wait()


def test_engines_that_only_copy_are_used_for_copies(device: Device) -> None:
    group = {use: device.driver._group(0, use) for use in DOING}
    assert group == {"copy": 1, "stage": 1, "fill": 0, "hash": 0, "pack": 0}
