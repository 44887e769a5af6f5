"""Pinned host memory for saved bytes: made while it is already being used, kept by policy.

First touch and registration cost more than the copy itself when they come first (16 GiB:
0.3 s each against 0.3 s). So a segment is one mapping with huge pages, made ready chunk by
chunk by a few threads, and a copy into a chunk is queued as soon as that chunk is ready.

A chunk that the driver refuses to pin is used all the same: copies to and from it then go
through the buffers of ``ring``, or if not even those are pinned, through the driver's own,
which is slow.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

from sleepbackends.errors import HostMemoryError, SleepBackendsError
from sleepbackends.host_limits import host_memory
from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm import places
from sleepbackends.vmm.driver import Driver
from sleepbackends.vmm.fingerprint import host_fingerprint
from sleepbackends.vmm.gaps import Gaps, carve_all
from sleepbackends.vmm.places import Retention, Slot

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20
"""What one thread makes ready at a time."""

SMALL_CHUNK_BYTES = 16 << 20
"""The same where others are not to notice: the driver lets nobody else in while it registers
memory, 1.6 ms for 64 MiB on an H200's host."""

THREADS = 8
"""More threads make first touch and registration slower, not faster (1.9 s with 16)."""


class Segment(Gaps):
    """One mapping of host memory, in chunks that become ready one after another.

    Each chunk is a promise to tell, once its memory is there, whether it is pinned; None as
    long as nobody has asked for it.

    Parameters
    ----------
    address, size_bytes : int
        The mapping.
    chunk_bytes : int
        The size of the chunks, but for the last.
    begin : callable
        Has the memory at an address made ready, so many bytes of it.
    """

    def __init__(
        self,
        address: int,
        size_bytes: int,
        chunk_bytes: int,
        begin: Callable[[int, int], Future[bool]],
    ) -> None:
        super().__init__(size_bytes)
        self.address = address
        self.chunk_bytes = chunk_bytes
        self.chunks: list[Future[bool] | None] = [None] * -(-size_bytes // chunk_bytes)
        self.views: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._begin = begin
        self._lock = threading.Lock()

    def chunk(self, number: int) -> Future[bool]:
        """Return a chunk, which is begun now if it was not before."""
        with self._lock:
            chunk = self.chunks[number]
            if chunk is None:
                at = number * self.chunk_bytes
                size_bytes = min(self.chunk_bytes, self.size_bytes - at)
                chunk = self.chunks[number] = self._begin(self.address + at, size_bytes)
            return chunk

    def begin(self) -> None:
        """Begin all chunks."""
        while None in self.chunks:
            self.chunk(self.chunks.index(None))

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it is taken, and nobody looks at it."""
        return self.free_bytes == self.size_bytes and not self.views

    @property
    def has_failed(self) -> bool:
        """Whether there was no memory for one of its chunks: it serves nobody any more."""
        begun = (chunk for chunk in self.chunks if chunk is not None and chunk.done())
        return any(not chunk.cancelled() and chunk.exception() for chunk in begun)


class Piece(NamedTuple):
    """Consecutive bytes of one chunk, ready to be copied to or from: a ``Place``.

    Parameters
    ----------
    host : int
        Address of the first.
    size_bytes : int
        How many there are.
    pinned : bool
        Whether a device copies from and to them at full speed.
    """

    host: int
    size_bytes: int
    pinned: bool

    def write(self, source: int) -> None:
        """Fill the piece with the bytes at an address."""
        ctypes.memmove(self.host, source, self.size_bytes)

    def read(self, target: int) -> bool:
        """Copy the bytes to an address; they are taken to be sound."""
        ctypes.memmove(target, self.host, self.size_bytes)
        return True


class Range(NamedTuple):
    """Consecutive bytes of a segment."""

    segment: Segment
    offset: int
    size_bytes: int

    @property
    def address(self) -> int:
        """Where the first is."""
        return self.segment.address + self.offset

    @property
    def has_failed(self) -> bool:
        """Whether its segment serves nobody any more."""
        return self.segment.has_failed

    def part(self, start: int, size_bytes: int) -> Range:
        """Return some of the bytes, counted from the first."""
        return Range(self.segment, self.offset + start, size_bytes)

    def pieces(self) -> Iterator[Piece]:
        """Go through the bytes, split where registrations meet, as each becomes ready.

        What is not pinned comes in pieces that fit a buffer.

        Raises
        ------
        HostMemoryError
            If there is no memory; ``give_back`` the slot, and the next one will be elsewhere.
        """
        offset, end = self.offset, self.offset + self.size_bytes
        while offset < end:
            number = offset // self.segment.chunk_bytes
            stop = min(end, (number + 1) * self.segment.chunk_bytes)
            pinned = self.segment.chunk(number).result()
            if not pinned:
                stop = min(stop, offset + places.BUFFER_BYTES)
            yield Piece(self.segment.address + offset, stop - offset, pinned)
            offset = stop

    def wait(self) -> None:
        """Wait until all of it is ready; raises what ``pieces`` raises."""
        for _ in self.pieces():
            pass

    def view(self, start: int, size_bytes: int) -> memoryview:
        """Return a read-only view that keeps the memory mapped, counted from the first byte."""
        buffer = host.buffer(self.address + start, size_bytes)
        self.segment.views[id(buffer)] = buffer
        return memoryview(buffer).cast("B").toreadonly()

    def is_followed_by(self, other: Range) -> bool:
        """Tell whether the other begins where this one ends."""
        return self.segment is other.segment and self.offset + self.size_bytes == other.offset

    def fingerprinting(self) -> Callable[[], int]:
        """Return what computes the fingerprint of the bytes, and keeps them there until then."""
        kept = self.view(0, self.size_bytes)

        def compute() -> int:
            with kept:
                return host_fingerprint(self.address, self.size_bytes)

        return compute


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

    unit_bytes: ClassVar[int] = 1
    chunk_limit_bytes: ClassVar[int | None] = None
    fingerprints_all: ClassVar[bool] = False

    def __init__(self, driver: Driver, budget_bytes: int | None, retention: Retention) -> None:
        self._driver = driver
        self._budget_bytes = budget_bytes
        self._retention = retention
        self._segments: list[Segment] = []
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(THREADS, thread_name_prefix="sleepbackends-pin")

    @property
    def retains(self) -> bool:
        """Whether memory is kept that is not needed now."""
        return self._retention == "retain"

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

    def take(self, sizes: Sequence[int], *, at_ease: bool = False) -> list[Slot]:
        """Take slots of these sizes; what is missing is made ready in the background.

        At ease, it is made ready only as it is asked for, in small steps; whoever takes
        something otherwise, be it nothing, is in a hurry for all of it.

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
                chunk_bytes = SMALL_CHUNK_BYTES if at_ease else CHUNK_BYTES
                serving.append(self._new_segment(host.round_up(missing), chunk_bytes))
                self._segments.append(serving[-1])
            if not at_ease:
                for segment in self._segments:
                    segment.begin()
            return [Slot(ranges) for ranges in carve_all(serving, sizes, Range)]

    def writable(self, ranges: Sequence[Range]) -> list[Range]:
        """Return the ranges: nobody else reads them."""
        return list(ranges)

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

    def _new_segment(self, size_bytes: int, chunk_bytes: int) -> Segment:
        address = host.reserve(size_bytes)
        try:
            host.map_memory(address, size_bytes)
        except BaseException:
            host.release(address, size_bytes)
            raise
        return Segment(address, size_bytes, chunk_bytes, self._begin)

    def _begin(self, address: int, size_bytes: int) -> Future[bool]:
        return self._workers.submit(self._make_ready, address, size_bytes)

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
        if segment.views:
            return False
        for number, chunk in enumerate(segment.chunks):
            if chunk is None or chunk.cancel() or chunk.exception() or not chunk.result():
                continue
            try:
                self._driver.unpin(segment.address + number * segment.chunk_bytes)
            except SleepBackendsError:
                logger.exception("%d bytes of host memory stay pinned", segment.size_bytes)
                return False
            segment.chunks[number] = _NOT_PINNED
        host.release(segment.address, segment.size_bytes)
        return True


_NOT_PINNED: Future[bool] = Future()
_NOT_PINNED.set_result(False)
