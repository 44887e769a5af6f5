"""Whether a device does what the backend needs: tried on a page, with the code used later.

Drivers have said success and meant something else, so bytes and the type of the pointer are
looked at and not only codes.
"""

from __future__ import annotations

from sleepbackends.errors import BackendUnavailableError, SleepBackendsError
from sleepbackends.vmm.address_space import AddressSpace, library_path
from sleepbackends.xpu.driver import XpuDriver
from sleepbackends.xpu.loader import LIBRARY

TAG = "self-test"

_PATTERN = bytes(range(1, 251))


def self_test(driver: XpuDriver, device: int) -> None:
    """Reserve, map, write, read, unmap and map again.

    Parameters
    ----------
    driver : XpuDriver
        The driver.
    device : int
        Ordinal of the device.

    Raises
    ------
    BackendUnavailableError
        If the device does not do what it should. Nothing is left of the test, unless the driver
        refuses to give it back.
    """
    name = driver.device(device).name
    try:
        space = AddressSpace(library_path("level_zero"), LIBRARY, driver)
        address = space.allocate(TAG, len(_PATTERN), device)
        try:
            problem = _use(driver, space, address, device)
        finally:
            space.free(address)
        left = [extent.address for extent in space.extents()]
    except SleepBackendsError as error:
        raise BackendUnavailableError(
            f"{name} lacks virtual memory that works: {error.message}", hint=error.hint
        ) from error
    if left:
        problem = "memory was not given back"
    if problem:
        raise BackendUnavailableError(
            f"{name} lacks virtual memory that works: {problem}",
            hint="update the Intel GPU driver, and report the versions if that does not help",
        )


def _use(driver: XpuDriver, space: AddressSpace, address: int, device: int) -> str:
    if not driver.is_device_pointer(device, address):
        # Seen with libraries that then refuse it (https://github.com/pytorch/pytorch/issues/158434).
        return "the driver does not take its address for one of device memory"
    driver.write(address, _PATTERN, device)
    if driver.read(address, len(_PATTERN), device) != _PATTERN:
        return "other bytes were read than were written"
    (extent,) = space.extents()
    held = driver.committed_bytes(device)
    space.begin()
    try:
        space.unmap([extent])
        if driver.committed_bytes(device) != held - extent.size_bytes:
            return "unmapped memory was not given back"
        space.create([extent])
        space.map([extent])
    finally:
        space.end()
    driver.write(address, _PATTERN[::-1], device)
    if driver.read(address, len(_PATTERN), device) != _PATTERN[::-1]:
        return "memory that was mapped again holds other bytes than were written"
    return ""
