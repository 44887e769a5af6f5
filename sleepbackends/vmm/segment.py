"""Host memory that is made ready bit by bit, and the pieces that are copied to and from."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm import places
from sleepbackends.vmm.fingerprint import host_fingerprint
from sleepbackends.vmm.gaps import Gaps


class Chunk(NamedTuple):
    """Two promises: that the memory is there, and then to tell whether it is pinned."""

    touched: Future[None]
    pinned: Future[bool]


class Segment(Gaps):
    """One mapping of host memory, in chunks that become ready one after another.

    A chunk is None as long as nobody has asked for it.

    Parameters
    ----------
    address, size_bytes : int
        The mapping.
    chunk_bytes : int
        The size of the chunks, but for the last.
    begin : callable
        Has the memory at an address made ready, so many bytes of it.
    node : int, optional
        The NUMA node it is to be on; None if any will do.
    """

    def __init__(
        self,
        address: int,
        size_bytes: int,
        chunk_bytes: int,
        begin: Callable[[int, int], Chunk],
        node: int | None = None,
    ) -> None:
        super().__init__(size_bytes)
        self.address = address
        self.chunk_bytes = chunk_bytes
        self.node = node
        self.chunks: list[Chunk | None] = [None] * -(-size_bytes // chunk_bytes)
        self.has_failed = False
        """Whether there was no memory for one of its chunks: it serves nobody any more."""
        self.views: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._pinned: dict[int, bool] = {}  # waiting for a promise takes long, even a kept one
        self._begin = begin
        self._lock = threading.Lock()

    def chunk(self, number: int) -> Chunk:
        """Return a chunk, which is begun now if it was not before."""
        with self._lock:
            chunk = self.chunks[number]
            if chunk is None:
                at = number * self.chunk_bytes
                size_bytes = min(self.chunk_bytes, self.size_bytes - at)
                chunk = self.chunks[number] = self._begin(self.address + at, size_bytes)
                chunk.pinned.add_done_callback(self._note)
            return chunk

    def is_pinned(self, number: int) -> bool:
        """Wait until a chunk is ready, and tell whether it is pinned.

        Raises
        ------
        HostMemoryError
            If there is no memory for it.
        """
        known = self._pinned.get(number)
        if known is None:
            known = self._pinned[number] = self.chunk(number).pinned.result()
        return known

    def _note(self, pinned: Future[bool]) -> None:
        if not pinned.cancelled() and pinned.exception() is not None:
            self.has_failed = True

    def begin(self) -> None:
        """Begin all chunks."""
        while None in self.chunks:
            self.chunk(self.chunks.index(None))

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it is taken, and nobody looks at it."""
        return self.free_bytes == self.size_bytes and not self.views


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
            pinned = self.segment.is_pinned(number)
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
