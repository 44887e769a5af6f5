"""Host memory that is made ready bit by bit, and the pieces that are copied to and from."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

from sleepbackends.errors import HostMemoryError
from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm import places
from sleepbackends.vmm.fingerprint import host_fingerprint
from sleepbackends.vmm.gaps import Gaps


class Segment(Gaps):
    """One mapping of host memory, in chunks that are made ready one after another.

    A chunk is touched in the background once somebody begins it, and registered by whoever
    first needs it.

    Parameters
    ----------
    address, size_bytes : int
        The mapping.
    chunk_bytes : int
        The size of the chunks, but for the last.
    touch : callable
        Begins to put memory behind an address, so many bytes of it.
    pin : callable
        Registers them, and tells whether the driver agreed.
    node : int, optional
        The NUMA node it is to be on; None if any will do.
    """

    def __init__(
        self,
        address: int,
        size_bytes: int,
        chunk_bytes: int,
        touch: Callable[[int, int], Future[None]],
        pin: Callable[[int, int], bool],
        node: int | None = None,
    ) -> None:
        super().__init__(size_bytes)
        self.address = address
        self.chunk_bytes = chunk_bytes
        self.node = node
        self.touched: list[Future[None] | None] = [None] * -(-size_bytes // chunk_bytes)
        self.pinned: dict[int, bool] = {}
        """Whether the driver agreed to pin a chunk, for those that it was asked for."""
        self.has_failed = False
        """Whether there was no memory for one of its chunks: it serves nobody any more."""
        self.views: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._touch = touch
        self._pin = pin
        self._is_leaving = False
        self._beginning = threading.Lock()
        self._pinning = threading.Lock()

    def leave(self, is_leaving: bool = True) -> None:
        """Make no more chunks ready, because the memory is being given up; or do so again."""
        with self._beginning, self._pinning:
            self._is_leaving = is_leaving

    def is_pinned(self, number: int) -> bool:
        """Have a chunk ready, which may take a while, and tell whether it is pinned.

        Raises
        ------
        HostMemoryError
            If there is no memory for it, or if it is being given up.
        """
        known = self.pinned.get(number)
        if known is not None:
            return known
        try:
            self._begin(number).result()
        except CancelledError:
            raise _given_back() from None
        with self._pinning:
            if self._is_leaving:
                raise _given_back()
            if number not in self.pinned:
                self.pinned[number] = self._pin(*self._extent(number))
            return self.pinned[number]

    def begin(self) -> None:
        """Have all chunks touched in the background."""
        while None in self.touched:
            self._begin(self.touched.index(None))

    def address_of(self, number: int) -> int:
        """Return where a chunk begins."""
        return self.address + number * self.chunk_bytes

    def _extent(self, number: int) -> tuple[int, int]:
        offset = number * self.chunk_bytes
        return self.address + offset, min(self.chunk_bytes, self.size_bytes - offset)

    def _begin(self, number: int) -> Future[None]:
        with self._beginning:
            if self._is_leaving:
                raise _given_back()
            touched = self.touched[number]
            if touched is None:
                touched = self.touched[number] = self._touch(*self._extent(number))
                touched.add_done_callback(self._note)
            return touched

    def _note(self, touched: Future[None]) -> None:
        if not touched.cancelled() and touched.exception() is not None:
            self.has_failed = True

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it is taken, and nobody looks at it."""
        return self.free_bytes == self.size_bytes and not self.views


def _given_back() -> HostMemoryError:
    return HostMemoryError("memory for saved bytes was given back", hint="save to new memory")


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

    def is_followed_by(self, other: object) -> bool:
        """Tell whether the other begins where this one ends."""
        return (
            isinstance(other, Range)
            and self.segment is other.segment
            and self.offset + self.size_bytes == other.offset
        )

    def fingerprinting(self) -> Callable[[], int]:
        """Return what computes the fingerprint of the bytes, and keeps them there until then."""
        kept = self.view(0, self.size_bytes)

        def compute() -> int:
            with kept:
                return host_fingerprint(self.address, self.size_bytes)

        return compute
