"""What kernels read and write: rows that are given and rows that are found.

A table is memory of the device with a mirror in pinned host memory. It is filled part after
part, one for each launch, and used from the start again once nothing in it is needed any more, so
that no launch allocates.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sleepbackends.errors import ClosedError, SleepBackendsError
from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm.driver import Event

if TYPE_CHECKING:
    from sleepbackends.cumem.driver import CudaDriver

logger = logging.getLogger(__name__)

LEAST_ROWS = 1024
"""Room of the first table: 32 KiB."""

Row = tuple[int, int]
"""Of 8 bytes each."""

_WORDS = 2
_ROW_BYTES = 8 * _WORDS


class Part:
    """Consecutive rows of a table, for one launch.

    Parameters
    ----------
    table : Table
        Whose rows they are.
    first, count : int
        Which.
    """

    def __init__(self, table: Table, first: int, count: int) -> None:
        self.table = table
        self.first = first
        self.count = count

    @property
    def size_bytes(self) -> int:
        """How many bytes the given rows take, and the found ones as many."""
        return self.count * _ROW_BYTES

    @property
    def given(self) -> tuple[int, int]:
        """Where the given rows are: on the device, on the host."""
        return self.table.row(self.first)

    @property
    def found(self) -> tuple[int, int]:
        """Where the found rows are: on the device, on the host."""
        return self.table.row(self.table.capacity + self.first)

    def write(self, rows: Sequence[Row]) -> None:
        """Put the given rows into host memory."""
        words = host.view(self.given[1], self.size_bytes).cast("Q")
        for index, row in enumerate(rows):
            words[_WORDS * index], words[_WORDS * index + 1] = row

    def read(self) -> list[Row]:
        """Return the found rows from host memory, and let them be used again.

        Raises
        ------
        ClosedError
            If the table is gone.
        """
        if not self.table.is_open:
            raise ClosedError(
                "the results went with their driver", hint="ask for them before closing it"
            )
        words = host.view(self.found[1], self.size_bytes).cast("Q")
        rows = list(zip(words[::_WORDS], words[1::_WORDS], strict=True))
        self.table.forget(self)
        return rows


class _Kept(NamedTuple):
    """Rows that a launch uses."""

    part: weakref.ref[Part]
    end: int
    event: Event | None

    def is_over(self) -> bool:
        """Tell whether nobody can read them any more and the device is done with them."""
        try:
            return self.part() is None and self.event is not None and self.event.done()
        except SleepBackendsError:
            return False


class Table:
    """Rows to give and rows to find, on one device and on the host.

    Parameters
    ----------
    driver : CudaDriver
        Allocates.
    device : int
        Ordinal of the device.
    capacity : int
        How many of each.

    Raises
    ------
    DeviceMemoryError
        If there is no room, on the device or for pinned memory; nothing is held.
    MechanismError
        If the driver failed otherwise; nothing is held.
    """

    def __init__(self, driver: CudaDriver, device: int, capacity: int) -> None:
        self.capacity = capacity
        self._driver = driver
        self._device = device
        self._device_base = self._host_base = 0
        self._used = 0
        self._outstanding: dict[int, _Kept] = {}
        size_bytes = 2 * capacity * _ROW_BYTES
        cu = driver._cu
        with driver.current(device):
            try:
                taken = driver.call(cu.cuMemAlloc, size_bytes, needed_bytes=size_bytes)
                self._device_base = int(taken)
                taken = driver.call(cu.cuMemHostAlloc, size_bytes, 0, needed_bytes=size_bytes)
                self._host_base = int(taken)
            except SleepBackendsError:
                self._free()
                raise

    @property
    def is_open(self) -> bool:
        """Whether its memory is there."""
        return self._host_base != 0

    def row(self, number: int) -> tuple[int, int]:
        """Return where a row is: on the device, on the host."""
        offset = number * _ROW_BYTES
        return self._device_base + offset, self._host_base + offset

    def take(self, count: int) -> Part | None:
        """Take so many rows of each; None if there are not enough."""
        if self._used + count > self.capacity:
            for first in [at for at, kept in self._outstanding.items() if kept.is_over()]:
                self._let_go(first)
        if self._used + count > self.capacity:
            return None
        self._used += count
        return Part(self, self._used - count, count)

    def keep(self, part: Part, event: Event | None) -> None:
        """Keep rows until they were read, or until nobody can read them and the event is past.

        Without an event, nobody knows when the device is done with them: they are kept for good.
        """
        self._outstanding[part.first] = _Kept(weakref.ref(part), part.first + part.count, event)

    def forget(self, part: Part) -> None:
        """Let rows go that were kept."""
        self._let_go(part.first)

    def _let_go(self, first: int) -> None:
        self._outstanding.pop(first, None)
        self._used = max((kept.end for kept in self._outstanding.values()), default=0)

    def give_back(self, part: Part) -> None:
        """Undo the last ``take``."""
        self._used = part.first

    def close(self) -> None:
        """Give the memory back; a failure is logged. The device must be done with it."""
        self._outstanding.clear()
        try:
            with self._driver.current(self._device):
                self._free()
        except SleepBackendsError:
            logger.exception("tables of device %d stay", self._device)

    def _free(self) -> None:
        cu = self._driver._cu
        held = [(cu.cuMemFree, self._device_base), (cu.cuMemFreeHost, self._host_base)]
        self._device_base = self._host_base = 0
        for free, address in held:
            try:
                if address:
                    self._driver.call(free, address)
            except SleepBackendsError:
                logger.exception("tables of device %d stay", self._device)


class Tables:
    """The tables of one device; there are more of them only where one was too small.

    Parameters
    ----------
    driver : CudaDriver
        Allocates.
    device : int
        Ordinal of the device.
    """

    def __init__(self, driver: CudaDriver, device: int) -> None:
        self._driver = driver
        self._device = device
        self._tables: list[Table] = []

    def take(self, count: int) -> Part:
        """Take so many rows of each.

        Raises
        ------
        DeviceMemoryError
            If there is no room for a new table; nothing changed.
        MechanismError
            If the driver failed otherwise; nothing changed.
        """
        while True:
            for table in self._tables:
                part = table.take(count)
                if part is not None:
                    return part
            # A caller who comes with more and more soon has tables enough.
            twice = 2 * max((table.capacity for table in self._tables), default=LEAST_ROWS // 2)
            self._tables.append(Table(self._driver, self._device, max(count, twice)))

    def close(self) -> None:
        """Give all memory back; a failure is logged. The device must be done with it."""
        for table in self._tables:
            table.close()
        self._tables.clear()
