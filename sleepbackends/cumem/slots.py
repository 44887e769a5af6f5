"""Device memory of our own for a while: physical memory, mapped where nothing else is."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sleepbackends.errors import SleepBackendsError

if TYPE_CHECKING:
    from sleepbackends.cumem.driver import CudaDriver

logger = logging.getLogger(__name__)

ALIGNMENT_BYTES = 512


def allocation_prop(cu: Any, device: int) -> Any:
    """Describe physical memory of a device to the driver."""
    wanted = cu.CUmemAllocationProp()
    wanted.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = device
    return wanted


class DeviceSlots:
    """Equal pieces of device memory that come and go together.

    Parameters
    ----------
    driver : CudaDriver
        Allocates.
    device : int
        Ordinal of the device.
    count : int
        How many pieces.
    size_bytes : int
        Of each.

    Raises
    ------
    DeviceMemoryError
        If there is not enough; nothing is held.
    MechanismError
        If the driver failed otherwise; nothing is held.
    """

    def __init__(self, driver: CudaDriver, device: int, count: int, size_bytes: int) -> None:
        self._driver = driver
        self._device = device
        self.size_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.addresses: list[int] = []
        cu, call = driver._cu, driver.call
        wanted = allocation_prop(cu, device)
        self._undo: list[tuple[Any, ...]] = []
        try:
            with driver.current(device):
                least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
                unit = int(call(cu.cuMemGetAllocationGranularity, wanted, least))
                total = -(-count * self.size_bytes // unit) * unit
                base = int(call(cu.cuMemAddressReserve, total, 0, 0, 0, needed_bytes=total))
                self._undo.append((cu.cuMemAddressFree, base, total))
                handle = call(cu.cuMemCreate, total, wanted, 0, needed_bytes=total)
                self._undo.append((cu.cuMemRelease, handle))
                call(cu.cuMemMap, base, total, 0, handle, 0)
                self._undo.append((cu.cuMemUnmap, base, total))
                access = cu.CUmemAccessDesc()
                access.location = wanted.location
                access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                call(cu.cuMemSetAccess, base, total, [access], 1)
        except BaseException:
            self.close()
            raise
        self.addresses = [base + number * self.size_bytes for number in range(count)]

    def close(self) -> bool:
        """Give the memory back, which nothing may use any more; tell whether that worked.

        A failure is logged, and closing again goes on where it was.
        """
        self.addresses = []
        if not self._undo:
            return True
        try:
            with self._driver.current(self._device):
                while self._undo:
                    self._driver.call(*self._undo[-1])
                    self._undo.pop()
        except SleepBackendsError:
            logger.exception("memory of device %d stays", self._device)
        return not self._undo
