"""A few pinned buffers between devices and saved bytes that are not in pinned memory.

Each buffer is in the hands of one thread at a time, which lets the device copy to it and
empties it, or fills it and lets the device copy from it. With a thread for each buffer, the
links, the memory and the disks are busy at once, and no more memory than theirs is held.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from sleepbackends.errors import HostMemoryError, SleepBackendsError
from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm import places
from sleepbackends.vmm.driver import Direction, Driver, Event, Lane
from sleepbackends.vmm.places import Place

logger = logging.getLogger(__name__)

BUFFERS = 16
"""The most buffers there are, of ``places.BUFFER_BYTES`` each, and the most threads."""

AHEAD = 4
"""How many copies are begun for each buffer: what goes on while the caller does other things."""


@dataclass
class Buffer:
    """Memory that bytes pass through.

    Parameters
    ----------
    address : int
        Where it is.
    size_bytes : int
        How large it is.
    pinned : bool
        Whether the driver has pinned it.
    used : Event or Lane, optional
        What to wait for before it is used for something else.
    """

    address: int
    size_bytes: int
    pinned: bool
    used: Event | Lane | None = None


class Ring:
    """The buffers of one backend: made when first needed, kept until they are trimmed.

    One caller at a time.

    Parameters
    ----------
    driver : Driver
        Pins them.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._buffers: list[Buffer] = []
        self._most = 0
        self._free = SimpleQueue[Buffer]()
        self._workers: ThreadPoolExecutor | None = None
        self._under_way = deque[Future[bool]]()
        # Not kept by the futures: they would keep each other, and events, alive.
        self._errors = SimpleQueue[BaseException]()

    @property
    def held_bytes(self) -> int:
        """How much host memory the buffers are."""
        return sum(buffer.size_bytes for buffer in list(self._buffers))

    @property
    def is_pinned(self) -> bool:
        """Whether there are buffers that the driver has pinned: others make nothing faster."""
        try:
            self._ready()
        except HostMemoryError:
            return False
        return self._buffers[0].pinned

    def copy(self, lane: Lane, direction: Direction, address: int, place: Place) -> Future[bool]:
        """Begin a copy between device memory and a place; its result tells if the bytes are sound.

        Bytes of a place that are known to be damaged do not reach the device. Waits while too
        many copies are under way. Whether one failed is told by ``check``.

        Raises
        ------
        HostMemoryError
            If there is no memory for even one buffer.
        SleepBackendsError
            If a copy that was begun earlier failed.
        """
        workers = self._ready()
        while len(self._under_way) >= AHEAD * BUFFERS:
            wait([self._under_way[0]])
            self._under_way.popleft()
        self.check()
        begun = workers.submit(self._copy_or_note, lane, direction, address, place)
        self._under_way.append(begun)
        return begun

    def check(self) -> None:
        """Raise what the first copy failed with, if one did.

        Raises
        ------
        SleepBackendsError
            The error; the copies that were begun are to be settled.
        """
        if not self._errors.empty():
            raise self._errors.get()

    def finish(self) -> None:
        """Wait until all copies that were begun have been made.

        Raises
        ------
        SleepBackendsError
            If one failed.
        """
        wait(self._under_way)
        self._under_way.clear()
        self.check()

    def settle(self) -> None:
        """Drop copies that no thread has begun, and wait until the others are made or failed.

        What they failed with is forgotten.
        """
        for copy in self._under_way:
            copy.cancel()
        wait(self._under_way)
        self._under_way.clear()
        self._errors = SimpleQueue()

    def trim(self) -> int:
        """Give the memory and the threads back, once nothing is under way; return the bytes.

        What the driver does not let go of is kept, and given back by a later call.
        """
        self.settle()
        if self._workers is not None:
            self._workers.shutdown(wait=True)
            self._workers = None
        self._free = SimpleQueue()
        before = self.held_bytes
        self._buffers = [buffer for buffer in self._buffers if not self._drop(buffer)]
        return before - self.held_bytes

    def _copy_or_note(self, lane: Lane, direction: Direction, address: int, place: Place) -> bool:
        try:
            with self._driver.aside():
                return self._copy(lane, direction, address, place)
        except BaseException as error:  # noqa: BLE001 - raised by ``check``
            self._errors.put(error)
            return False

    def _copy(self, lane: Lane, direction: Direction, address: int, place: Place) -> bool:
        buffer = self._take()
        try:
            if direction == "up" and not place.read(buffer.address):
                return False
            # Until there is an event: should it be refused, the copy is under way all the same.
            buffer.used = lane
            if direction == "up":
                lane.to_device(address, buffer.address, place.size_bytes)
            else:
                lane.to_host(buffer.address, address, place.size_bytes)
            buffer.used = lane.event()
            _let_go(buffer)
            if direction == "down":
                place.write(buffer.address)
            return True
        finally:
            self._free.put(buffer)

    def _take(self) -> Buffer:
        """Take a free buffer, or a new one while there may be more, and be sure that it is idle."""
        try:
            buffer = self._free.get_nowait()
        except Empty:
            buffer = self._another() or self._free.get()
        try:
            _let_go(buffer)
        except BaseException:
            self._free.put(buffer)
            raise
        return buffer

    def _ready(self) -> ThreadPoolExecutor:
        if self._workers is None:
            self._most = BUFFERS
            if not self._buffers:
                self._buffers.append(self._first())
            for buffer in self._buffers:
                self._free.put(buffer)
            self._workers = ThreadPoolExecutor(BUFFERS, "sleepbackends-ring")
        return self._workers

    def _first(self) -> Buffer:
        try:
            return self._new(pinned=True)
        except HostMemoryError as error:
            logger.warning("%s; copies to what is not pinned will be slow", str(error))
            return self._new(pinned=False)

    def _another(self) -> Buffer | None:
        """Make one more buffer like the first; None if there are as many as there can be."""
        with self._lock:
            if len(self._buffers) >= self._most:
                return None
            try:
                buffer = self._new(pinned=self._buffers[0].pinned)
            except HostMemoryError as error:
                logger.warning("%s; there are %d buffers", str(error), len(self._buffers))
                self._most = len(self._buffers)
                return None
            self._buffers.append(buffer)
            return buffer

    def _new(self, *, pinned: bool) -> Buffer:
        size_bytes = places.BUFFER_BYTES
        address = host.reserve(size_bytes)
        try:
            host.map_memory(address, size_bytes)
            host.populate(address, size_bytes)
            if pinned:
                self._driver.pin(address, size_bytes)
        except BaseException:
            host.release(address, size_bytes)
            raise
        return Buffer(address, size_bytes, pinned)

    def _drop(self, buffer: Buffer) -> bool:
        try:
            _let_go(buffer)
            if buffer.pinned:
                self._driver.unpin(buffer.address)
        except SleepBackendsError:
            logger.exception("%d bytes of host memory stay pinned", buffer.size_bytes)
            return False
        host.release(buffer.address, buffer.size_bytes)
        return True


def _let_go(buffer: Buffer) -> None:
    """Wait until the device has done with a buffer; if that fails, the buffer remembers."""
    if buffer.used is not None:
        buffer.used.wait()
        buffer.used = None
