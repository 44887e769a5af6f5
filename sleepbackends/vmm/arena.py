"""Pinned host memory for saved bytes: made while it is already being used, kept by policy.

First touch and registration cost more than the copy itself when they come first (16 GiB:
0.3 s each against 0.3 s). So a segment is one mapping with huge pages, made ready chunk by
chunk by a few threads, and a copy into a chunk is queued as soon as that chunk is ready.

A chunk that the driver refuses to pin is used all the same: copies to and from it then go
through the driver's own small ring of pinned memory, slower.
"""

from __future__ import annotations

import bisect
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple

from sleepbackends.errors import HostMemoryError, SleepBackendsError
from sleepbackends.host_limits import host_memory
from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm.driver import Driver

logger = logging.getLogger(__name__)

Retention = Literal["retain", "release", "none"]
"""What becomes of pinned memory once its bytes are restored: kept for the next sleep,
given back in the background, or given back at once."""

CHUNK_BYTES = 64 << 20
"""What one thread makes ready at a time."""

THREADS = 8
"""More threads make first touch and registration slower, not faster (1.9 s with 16)."""


class Segment:
    """One mapping of host memory, in chunks that become ready one after another.

    Each chunk is a promise to tell, once its memory is there, whether it is pinned.
    """

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.chunks: list[Future[bool]] = []
        self.free_bytes = size_bytes
        self._gaps = [(0, size_bytes)]

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it is taken."""
        return self.free_bytes == self.size_bytes

    @property
    def has_failed(self) -> bool:
        """Whether there was no memory for one of its chunks: it serves nobody any more."""
        return any(c.done() and not c.cancelled() and c.exception() for c in self.chunks)

    def carve(self, size_bytes: int) -> Range:
        """Take up to so many bytes from the first gap."""
        offset, room = self._gaps[0]
        taken = min(room, size_bytes)
        if taken == room:
            del self._gaps[0]
        else:
            self._gaps[0] = (offset + taken, room - taken)
        self.free_bytes -= taken
        return Range(self, offset, taken)

    def give_back(self, offset: int, size_bytes: int) -> None:
        """Return bytes, and join the gaps on either side."""
        self.free_bytes += size_bytes
        at = bisect.bisect(self._gaps, (offset, 0))
        if at < len(self._gaps) and self._gaps[at][0] == offset + size_bytes:
            size_bytes += self._gaps.pop(at)[1]
        if at and sum(self._gaps[at - 1]) == offset:
            before, room = self._gaps.pop(at - 1)
            offset, size_bytes, at = before, room + size_bytes, at - 1
        self._gaps.insert(at, (offset, size_bytes))


class Range(NamedTuple):
    """Consecutive bytes of a segment."""

    segment: Segment
    offset: int
    size_bytes: int


class Piece(NamedTuple):
    """Consecutive bytes of one chunk, ready to be copied to or from.

    Parameters
    ----------
    host : int
        Address of the first.
    size_bytes : int
        How many there are.
    """

    host: int
    size_bytes: int


class Slot:
    """Room for the saved bytes of one block, wherever there was some."""

    def __init__(self, ranges: list[Range]) -> None:
        self.ranges = ranges

    @property
    def size_bytes(self) -> int:
        """How many bytes it holds."""
        return sum(part.size_bytes for part in self.ranges)

    def pieces(self) -> Iterator[Piece]:
        """Go through the slot, split where registrations meet, as each becomes ready.

        Raises
        ------
        HostMemoryError
            If there is no memory; ``give_back`` the slot, and the next one will be elsewhere.
        """
        for segment, offset, size_bytes in self.ranges:
            end = offset + size_bytes
            while offset < end:
                number = offset // CHUNK_BYTES
                stop = min(end, (number + 1) * CHUNK_BYTES)
                segment.chunks[number].result()
                yield Piece(segment.address + offset, stop - offset)
                offset = stop


class Arena:
    """The pinned host memory of one backend.

    Parameters
    ----------
    driver : Driver
        Registers memory.
    budget_bytes : int, optional
        The most it may hold; None is limited by the machine alone.
    retention : {"retain", "release", "none"}
        What becomes of memory whose bytes were restored.
    """

    def __init__(self, driver: Driver, budget_bytes: int | None, retention: Retention) -> None:
        self._driver = driver
        self._budget_bytes = budget_bytes
        self._retention = retention
        self._segments: list[Segment] = []
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(THREADS, thread_name_prefix="sleepbackends-pin")

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory held now, used or not."""
        return sum(segment.size_bytes for segment in list(self._segments))

    @property
    def used_bytes(self) -> int:
        """Bytes of host memory that hold something."""
        return sum(segment.size_bytes - segment.free_bytes for segment in list(self._segments))

    def check_room(self, size_bytes: int) -> None:
        """Check that slots of so many bytes in all can be had.

        Raises
        ------
        HostMemoryError
            If the budget or the machine has not enough.
        """
        self.trim(failed_only=True)
        with self._lock:
            self._check_room(size_bytes - sum(s.free_bytes for s in self._serving()))

    def take(self, sizes: Sequence[int]) -> list[Slot]:
        """Take slots of these sizes; what is missing is made ready in the background.

        Raises
        ------
        HostMemoryError
            If the budget or the machine has not enough; nothing was taken.
        """
        self.trim(failed_only=True)
        with self._lock:
            # Listed once: a segment may fail at any moment, and then the copies say so.
            serving = self._serving()
            missing = sum(sizes) - sum(segment.free_bytes for segment in serving)
            if missing > 0:
                self._check_room(missing)
                serving.append(self._new_segment(host.round_up(missing)))
                self._segments.append(serving[-1])
            segments = iter(serving)
            segment = next(segments, None)
            slots = []
            for size in sizes:
                ranges: list[Range] = []
                while size and segment is not None:
                    ranges.append(segment.carve(size))
                    size -= ranges[-1].size_bytes
                    if not segment.free_bytes:
                        segment = next(segments, None)
                slots.append(Slot(ranges))
            return slots

    def give_back(self, slot: Slot) -> None:
        """Give a slot back; the memory is kept or given back as the policy says."""
        with self._lock:
            for segment, offset, size_bytes in slot.ranges:
                segment.give_back(offset, size_bytes)
            slot.ranges = []
            idle = any(segment.is_empty for segment in self._segments)
        if idle and self._retention == "release":
            self._workers.submit(self.trim)
        elif idle and self._retention == "none":
            self.trim()

    def trim(self, *, failed_only: bool = False) -> int:
        """Give back segments that hold nothing, or only those without memory; return the bytes."""
        with self._lock:
            idle = [s for s in self._segments if s.is_empty and (s.has_failed or not failed_only)]
            self._segments = [s for s in self._segments if s not in idle]
        kept = [segment for segment in idle if not self._drop(segment)]
        with self._lock:
            self._segments += kept
        return sum(segment.size_bytes for segment in idle if segment not in kept)

    def close(self) -> None:
        """Give everything back. Repeating the call does nothing."""
        self._workers.shutdown(wait=True)
        with self._lock:
            segments, self._segments = self._segments, []
        self._segments = [segment for segment in segments if not self._drop(segment)]

    def _serving(self) -> list[Segment]:
        return [s for s in self._segments if s.free_bytes and not s.has_failed]

    def _check_room(self, more: int) -> None:
        if more <= 0:
            return
        needed = self.held_bytes + host.round_up(more)
        if self._budget_bytes is not None and needed > self._budget_bytes:
            raise HostMemoryError(
                f"saving needs {needed} bytes of pinned memory and the budget is "
                f"{self._budget_bytes}",
                needed_bytes=needed,
                available_bytes=self._budget_bytes,
                hint="raise the option host_budget_bytes, or discard more tags",
            )
        memory = host_memory()
        if more > memory.available_bytes:
            raise HostMemoryError(
                f"saving needs {more} more bytes of host memory and {memory.available_bytes} "
                f"are available (limited by {memory.source})",
                needed_bytes=more,
                available_bytes=memory.available_bytes,
                hint="free host memory, raise that limit, or discard more tags",
            )

    def _new_segment(self, size_bytes: int) -> Segment:
        segment = Segment(host.reserve(size_bytes), size_bytes)
        try:
            host.map_memory(segment.address, size_bytes)
        except BaseException:
            host.release(segment.address, size_bytes)
            raise
        segment.chunks = [
            self._workers.submit(
                self._make_ready, segment.address + at, min(CHUNK_BYTES, size_bytes - at)
            )
            for at in range(0, size_bytes, CHUNK_BYTES)
        ]
        return segment

    def _make_ready(self, address: int, size_bytes: int) -> bool:
        host.populate(address, size_bytes)
        try:
            self._driver.pin(address, size_bytes)
        except HostMemoryError as error:
            logger.warning("%s; copies to and from it will be slow", error)
            return False
        return True

    def _drop(self, segment: Segment) -> bool:
        """Unpin and unmap a segment; tell whether that worked, else it can be tried again."""
        for number, chunk in enumerate(segment.chunks):
            if chunk.cancel() or chunk.exception() is not None or not chunk.result():
                continue
            try:
                self._driver.unpin(segment.address + number * CHUNK_BYTES)
            except SleepBackendsError:
                logger.exception("%d bytes of host memory stay pinned", segment.size_bytes)
                return False
            segment.chunks[number] = _NOT_PINNED
        host.release(segment.address, segment.size_bytes)
        return True


_NOT_PINNED: Future[bool] = Future()
_NOT_PINNED.set_result(False)
