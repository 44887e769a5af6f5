"""What kernels find out about many things at once: rows go there, a kernel runs, rows come back.

It goes on beside copies: those need the device's memory speed for a hundredth of what it has. The
rows are carried by a kernel as well: a copy would wait behind all those of the transition.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sleepbackends.cumem.lanes import CudaEvent, CudaLane
from sleepbackends.cumem.tables import Part, Row, Tables
from sleepbackends.errors import ClosedError, SleepBackendsError

if TYPE_CHECKING:
    from sleepbackends.cumem.driver import CudaDriver

logger = logging.getLogger(__name__)

CARRY = "carry"
CARRY_HEADER = "carry.h"
"""The kernel that carries rows, and the header that whoever compiles it includes."""

_CARRY_THREADS = 256

Launch = Callable[[CudaLane, int, int], None]
"""Queues a kernel, by where the given and the found rows are on the device."""

ResultT = TypeVar("ResultT")


def carry_header() -> tuple[str, bytes]:
    """Read the header, as a kernel's source has it."""
    return CARRY_HEADER, (Path(__file__).parent / "kernels" / CARRY_HEADER).read_bytes()


class Batches:
    """Rows for the kernels of one device, and its lane for hashing.

    Parameters
    ----------
    driver : CudaDriver
        Allocates, launches and waits.
    device : int
        Ordinal of the device.
    carry : CUfunction
        The kernel that carries rows.
    lock : RLock
        Held by whoever calls; ``result`` takes it.
    """

    def __init__(self, driver: CudaDriver, device: int, carry: Any, lock: threading.RLock) -> None:
        self._driver = driver
        self._device = device
        self._carry = carry
        self._lock = lock
        self._tables = Tables(driver, device)
        self._lane: CudaLane | None = None
        self._is_open = True

    def prepare(self, count: int) -> None:
        """Have room for so many rows.

        Raises
        ------
        DeviceMemoryError, MechanismError
            If there is none.
        """
        self._find_lane()
        part = self._tables.take(count)
        part.table.give_back(part)

    def _find_lane(self) -> CudaLane:
        if self._lane is None:
            self._lane = self._driver.lane(self._device, "hash")
        return self._lane

    def queue(
        self, rows: Sequence[Row], launch: Launch, convert: Callable[[list[Row]], ResultT]
    ) -> Batch[ResultT]:
        """Queue a kernel over rows, of which there is at least one.

        Parameters
        ----------
        rows : sequence of (int, int)
            What the kernel is given.
        launch : callable
            Queues the kernel; the rows that it finds begin as zeros.
        convert : callable
            Makes the result of what was found.

        Raises
        ------
        DeviceMemoryError, MechanismError
            If there is no room or the driver refuses; nothing is under way.
        ClosedError
            If the kernels went with their driver; nothing is under way.
        """
        # The driver crashes on a kernel that was unloaded.
        if not self._is_open:
            raise ClosedError("the kernels were closed with their backend", hint="create a new one")
        lane = self._find_lane()
        part = self._tables.take(len(rows))
        part.write(rows)
        try:
            event = self._launch(lane, part, launch)
        except SleepBackendsError:
            self._withdraw(lane, part)
            raise
        part.table.keep(part, event)
        return Batch(part, event, convert, self._lock)

    def _launch(self, lane: CudaLane, part: Part, launch: Launch) -> CudaEvent:
        (given, given_on_host), (found, found_on_host) = part.given, part.found
        self._queue_carry(lane, given_on_host, part.count, given)
        lane.fill(found, part.size_bytes, 0)
        launch(lane, given, found)
        self._queue_carry(lane, found, part.count, found_on_host)
        return lane.event()

    def _queue_carry(self, lane: CudaLane, source: int, count: int, target: int) -> None:
        pointers = ((ctypes.c_void_p, source), (ctypes.c_uint, count), (ctypes.c_void_p, target))
        lane.launch(self._carry, -(-count // _CARRY_THREADS), _CARRY_THREADS, pointers)

    def _withdraw(self, lane: CudaLane, part: Part) -> None:
        """Use rows again only once the device has surely left them alone."""
        try:
            lane.wait()
        except SleepBackendsError:
            part.table.keep(part, None)
        else:
            part.table.give_back(part)

    def close(self) -> None:
        """Give everything back, once the lane is done; a failure is logged."""
        self._is_open = False
        try:
            if self._lane is not None:
                self._lane.wait()
        except SleepBackendsError:
            logger.exception("waiting for kernels of device %d failed", self._device)
        self._tables.close()


class Batch(Generic[ResultT]):
    """Something that a kernel is finding out."""

    def __init__(
        self,
        part: Part,
        event: CudaEvent,
        convert: Callable[[list[Row]], ResultT],
        lock: threading.RLock,
    ) -> None:
        self._part = part
        self._event: CudaEvent | None = event
        self._convert = convert
        self._lock = lock
        self._found: list[ResultT] = []

    def result(self) -> ResultT:
        """Wait for it and return it; the same when asked again.

        Raises
        ------
        MechanismError
            If it could not be found out.
        ClosedError
            If the driver was closed before.
        """
        event = self._event
        if event is not None:
            event.wait()
        with self._lock:
            if not self._found:
                self._found.append(self._convert(self._part.read()))
                self._event = None
            return self._found[0]


class Found(Generic[ResultT]):
    """Something that needs no kernel."""

    def __init__(self, result: ResultT) -> None:
        self._result = result

    def result(self) -> ResultT:
        """Return it."""
        return self._result
