"""The saved bytes of one block, in chunks, packed or as they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sleepbackends.errors import RequestError
from sleepbackends.vmm.address_space import Extent
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.joined import first_bytes
from sleepbackends.vmm.packing.unpacking import unpacked
from sleepbackends.vmm.places import Place, Room, Saved, Slot


@dataclass(slots=True, eq=False)
class Chunk:
    """Consecutive bytes of a block, and where they are saved.

    Parameters
    ----------
    span : Span
        Where they are on the device.
    room : Room
        Where they may be saved.
    saved : Saved
        Where they are: the first bytes of the room.
    fingerprint : int or None
        Of the bytes that are saved, not packed; None where nothing is known of them.
    writes : int
        How often they were, or began to be, overwritten.
    """

    span: Span
    room: Room
    saved: Saved
    fingerprint: int | None = None
    writes: int = 0

    @property
    def size_bytes(self) -> int:
        """How many bytes it is."""
        return self.span.size_bytes

    @property
    def is_packed(self) -> bool:
        """Whether the saved bytes are packed: then they are fewer."""
        return self.saved.size_bytes < self.span.size_bytes

    def transfers(self) -> Iterator[tuple[int, Place]]:
        """List its copies as they are: device address, and where the bytes there are saved.

        Raises
        ------
        HostMemoryError
            If there is no memory where they are to be saved.
        """
        address = self.span.address
        for place in self.saved.pieces():
            yield address, place
            address += place.size_bytes

    def overwrite(self, saved_bytes: int) -> None:
        """Note that from now on the saved bytes are neither the old ones nor the new ones.

        Parameters
        ----------
        saved_bytes : int
            How many the new ones will be.
        """
        self.saved = first_bytes(self.room, saved_bytes)
        self.fingerprint = None
        self.writes += 1

    def view(self, start: int, size_bytes: int) -> memoryview:
        """Return some of its bytes, read-only, not packed, counted from its first.

        Raises
        ------
        ContentsLostError
            If the saved bytes are known to be damaged.
        StorageError
            If they cannot be read.
        """
        if self.is_packed:
            return unpacked(self.saved, start, size_bytes)
        return self.saved.view(start, size_bytes)

    def is_followed_by(self, other: Chunk) -> bool:
        """Tell whether a view may go on from the end of its saved bytes into the other's."""
        packed = self.is_packed or other.is_packed
        return not packed and self.saved.is_followed_by(other.saved)


class HostCopy:
    """Room for the bytes of one block, in chunks.

    Parameters
    ----------
    extent : Extent
        The block's extent as it was when the room was taken.
    chunks : sequence of Chunk
        The bytes of it that were allocated then.
    """

    def __init__(self, extent: Extent, chunks: Sequence[Chunk]) -> None:
        self.extent = extent
        self.chunks = chunks

    @property
    def slot(self) -> Slot:
        """All of its room."""
        return Slot([part for chunk in self.chunks for part in chunk.room])

    def fits(self, extent: Extent) -> bool:
        """Tell whether nothing of the extent came or went since the room was taken."""
        own = self.extent
        return own is extent or (own.id == extent.id and own.generation == extent.generation)

    @property
    def known_bytes(self) -> int:
        """How many saved bytes have a fingerprint."""
        known = (chunk for chunk in self.chunks if chunk.fingerprint is not None)
        return sum(chunk.size_bytes for chunk in known)

    def view(self, address: int, size_bytes: int) -> memoryview:
        """Return saved bytes, read-only; where they lie in one piece without copying them.

        Raises
        ------
        RequestError
            If not all of these addresses were allocated when the copy was made.
        ContentsLostError
            If the saved bytes are known to be damaged.
        StorageError
            If they cannot be read.
        """
        end = address + size_bytes
        parts: list[tuple[Chunk, int, int]] = []
        for chunk in self.chunks:
            first = chunk.span.address
            start, stop = max(address, first), min(end, first + chunk.size_bytes)
            if start < stop:
                parts.append((chunk, start - first, stop - start))
        if not parts or sum(size for _, _, size in parts) != size_bytes:
            raise RequestError(
                f"not all of the {size_bytes} bytes at {address:#x} were saved",
                hint="ask for memory that was allocated when its tag went to sleep",
            )
        if all(one.is_followed_by(other) for (one, *_), (other, *_) in pairwise(parts)):
            return parts[0][0].view(parts[0][1], size_bytes)
        found, at = bytearray(size_bytes), 0
        for chunk, start, size in parts:
            found[at : at + size] = chunk.view(start, size)
            at += size
        return memoryview(found).toreadonly()


def cut(base: int, ranges: Sequence[tuple[int, int]], most_bytes: int) -> list[Span]:
    """Cut ranges, as offset and size from an address, into what can be a chunk."""
    return [
        Span(base + at, min(most_bytes, offset + size_bytes - at))
        for offset, size_bytes in ranges
        for at in range(offset, offset + size_bytes, most_bytes)
    ]


def laid_out(
    spans: Sequence[Span], sizes: Sequence[int], ranges: Room, unit_bytes: int
) -> Iterator[Chunk]:
    """Give each span so much room, multiples of a unit, of ranges that are just as large.

    What has room for its bytes as they are becomes several chunks where a range ends. What is to
    be packed stays one.
    """
    left = deque(ranges)
    for span, size_bytes in zip(spans, sizes, strict=True):
        if size_bytes < span.size_bytes:
            room = list(_taken(left, size_bytes))
            yield Chunk(span, room, first_bytes(room, size_bytes))
            continue
        address = span.address
        for part in _taken(left, size_bytes):
            step = min(part.size_bytes, span.address + span.size_bytes - address)
            yield Chunk(Span(address, step), [part], part.part(0, step))
            address += step


def _taken(ranges: deque[Any], size_bytes: int) -> Iterator[Any]:
    """Take so many bytes from the first ranges."""
    while size_bytes:
        part = ranges.popleft()
        if part.size_bytes > size_bytes:
            rest = part.part(size_bytes, part.size_bytes - size_bytes)
            ranges.appendleft(rest)
            part = part.part(0, size_bytes)
        yield part
        size_bytes -= part.size_bytes
