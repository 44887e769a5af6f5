"""Saved bytes of blocks, and what is known about them.

A copy is kept after its block is awake again, where the policy of the store says so. Each
chunk of it has a fingerprint; a chunk whose bytes on the device have the same one need not be
copied again. Whether a copy is owed to its block is told by the ledger; all others are a
cache, which goes as soon as its room is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sleepbackends.errors import NoRoomError, RequestError
from sleepbackends.hostmemory import driver as host
from sleepbackends.ledger import Block
from sleepbackends.vmm.address_space import Extent
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.places import Place, Saved, Slot, Store

CHUNK_BYTES = 32 << 20
"""What is compared, and copied or not, as one, where the store has room for so much at a time."""

Spare = Callable[[], Collection[Block]]
"""Lists blocks whose copies may go for the room of others; asked only if room is missing."""


@dataclass(slots=True)
class Chunk:
    """Consecutive bytes of a block and of a store.

    Parameters
    ----------
    span : Span
        Where they are on the device.
    saved : Saved
        Where they are.
    fingerprint : int or None
        Of the saved bytes; None where nothing is known of them.
    writes : int
        How often they were, or began to be, overwritten.
    """

    span: Span
    saved: Saved
    fingerprint: int | None = None
    writes: int = 0

    @property
    def size_bytes(self) -> int:
        """How many bytes it is."""
        return self.span.size_bytes

    def transfers(self) -> Iterator[tuple[int, Place]]:
        """List its copies: device address, and where the bytes there are saved.

        Raises
        ------
        HostMemoryError
            If there is no memory where they are to be saved.
        """
        address = self.span.address
        for place in self.saved.pieces():
            yield address, place
            address += place.size_bytes

    def overwrite(self) -> None:
        """Note that from now on the saved bytes are neither the old ones nor the new ones."""
        self.fingerprint = None
        self.writes += 1


class HostCopy:
    """Room for the bytes of one block, in chunks.

    Parameters
    ----------
    extent : Extent
        The block's extent as it was when the room was taken.
    ranges : sequence of (offset, size_bytes)
        What of the extent is saved: the bytes that were allocated then.
    slot : Slot
        Room for exactly those bytes, each range of them rounded up to the store's unit.
    store : Store
        Whose room it is.
    """

    def __init__(
        self, extent: Extent, ranges: Sequence[tuple[int, int]], slot: Slot, store: Store
    ) -> None:
        self.extent = extent
        self.slot = slot
        self.chunks = list(_cut(extent.address, ranges, slot.ranges, store))

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
        parts: list[tuple[Saved, int, int]] = []
        for chunk in self.chunks:
            first = chunk.span.address
            start, stop = max(address, first), min(end, first + chunk.size_bytes)
            if start < stop:
                parts.append((chunk.saved, start - first, stop - start))
        if not parts or sum(size for _, _, size in parts) != size_bytes:
            raise RequestError(
                f"not all of the {size_bytes} bytes at {address:#x} were saved",
                hint="ask for memory that was allocated when its tag went to sleep",
            )
        ranges = [saved for saved, _, _ in parts]
        if all(one.is_followed_by(other) for one, other in pairwise(ranges)):
            return ranges[0].view(parts[0][1], size_bytes)
        return memoryview(b"".join(saved.view(start, size) for saved, start, size in parts))


def _cut(
    base: int, ranges: Sequence[tuple[int, int]], saved: Sequence[Saved], store: Store
) -> Iterator[Chunk]:
    """Cut where either the extent's or the slot's ranges end, and where a chunk is full."""
    most = min(CHUNK_BYTES, store.chunk_limit_bytes or CHUNK_BYTES)
    places = iter(saved)
    place, used = None, 0
    for offset, size_bytes in ranges:
        end = offset + size_bytes
        while offset < end:
            if place is None or used == place.size_bytes:
                place, used = next(places), 0
            step = min(end - offset, place.size_bytes - used, most)
            yield Chunk(Span(base + offset, step), place.part(used, step))
            offset, used = offset + step, used + host.round_up(step, store.unit_bytes)


class Copies:
    """The copies of one backend, by address of their blocks.

    Parameters
    ----------
    store : Store
        Where they are.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._copies: dict[int, HostCopy] = {}
        # Devices on which work of ours may still be under way, and the room that it may
        # still use although it was given back.
        self._unsettled: set[int] = set()
        self._held_back: list[tuple[int, Slot]] = []

    def __getitem__(self, block: Block) -> HostCopy:
        return self._copies[block.address]

    def __contains__(self, block: Block) -> bool:
        return block.address in self._copies

    def check_room(self, blocks: Sequence[Block], spare: Spare) -> None:
        """Check that all these blocks can be saved, if need be at the cost of spare copies.

        Raises
        ------
        NoRoomError
            If they cannot.
        """
        needed = sum(self._round(block.size_bytes) for block in blocks if not self._usable(block))
        try:
            self._store.check_room(needed)
        except NoRoomError:
            if not self._evict(spare):
                raise
            self._store.check_room(needed)

    def prepare(
        self,
        blocks: Sequence[Block],
        spare: Spare,
        live_ranges: Callable[[int], list[tuple[int, int]]],
        *,
        at_ease: bool = False,
    ) -> None:
        """Have a copy for each block, with or without contents; see ``Store.take``.

        Raises
        ------
        NoRoomError
            If there is no room; copies that were there are still there, unless spare.
        """
        new = [block for block in blocks if not self._usable(block)]
        for block in new:
            self.drop(block)
        ranges = [live_ranges(block.extra.id) for block in new]
        sizes = [sum(self._round(size) for _, size in each) for each in ranges]
        devices = [block.extra.device for block in new]
        try:
            slots = self._store.take(sizes, devices=devices, at_ease=at_ease)
        except NoRoomError:
            if not self._evict(spare):
                raise
            slots = self._store.take(sizes, devices=devices, at_ease=at_ease)
        for block, live, slot in zip(new, ranges, slots, strict=True):
            self._copies[block.address] = HostCopy(block.extra, live, slot, self._store)

    def all(self) -> list[HostCopy]:
        """List the copies there are."""
        return list(self._copies.values())

    def holds(self, copy: HostCopy) -> bool:
        """Tell whether a copy was not dropped or replaced."""
        return self._copies.get(copy.extent.address) is copy

    def make_writable(
        self, parts: Sequence[tuple[HostCopy, Chunk]], spare: Spare = lambda: ()
    ) -> None:
        """Have room of their own for chunks that are to be overwritten.

        Raises
        ------
        NoRoomError
            If there is no room; the saved bytes of all chunks are still there, unless spare.
        """
        if not parts:
            return
        ranges = [chunk.saved for _, chunk in parts]
        try:
            own = self._store.writable(ranges)
        except NoRoomError:
            if not self._evict(spare):
                raise
            own = self._store.writable(ranges)
        for (copy, chunk), saved in zip(parts, own, strict=True):
            if saved is not chunk.saved:
                chunk.overwrite()
                self.move(copy, chunk, saved)

    def move(self, copy: HostCopy, chunk: Chunk, saved: Saved) -> None:
        """Say that a chunk's bytes are elsewhere now, and give back where they were.

        Only where the store's unit is a byte, so that the chunks are all there is of a slot.
        """
        before, chunk.saved = chunk.saved, saved
        copy.slot.ranges = [part.saved for part in copy.chunks]
        self._give_back(copy.extent.device, Slot([before]))

    def retire(self, block: Block) -> None:
        """Keep the copy of a block that does not need it, for the next time, if it is good."""
        copy = self._copies.get(block.address)
        if copy is None:
            return
        if not self._store.retains or copy.slot.has_failed:
            self.drop(block)

    def drop(self, block: Block) -> None:
        """Give the room of a block's copy back, if there is one."""
        copy = self._copies.pop(block.address, None)
        if copy is not None:
            self._give_back(copy.extent.device, copy.slot)

    def unsettle(self, device: int) -> None:
        """Note that work under way on a device may still use host memory of ours."""
        self._unsettled.add(device)

    def is_settled(self, device: int) -> bool:
        """Tell whether nothing of ours is under way on a device."""
        return device not in self._unsettled

    def settle(self, device: int) -> None:
        """Note that a device has been waited for."""
        self._unsettled.discard(device)
        held_back, self._held_back = self._held_back, []
        for of_device, slot in held_back:
            self._give_back(of_device, slot)

    def _round(self, size_bytes: int) -> int:
        return host.round_up(size_bytes, self._store.unit_bytes)

    def _usable(self, block: Block) -> bool:
        copy = self._copies.get(block.address)
        return copy is not None and copy.fits(block.extra)

    def _evict(self, spare: Spare) -> bool:
        blocks = spare()
        for block in blocks:
            self.drop(block)
        return bool(blocks)

    def _give_back(self, device: int, slot: Slot) -> None:
        if device in self._unsettled:
            self._held_back.append((device, slot))
        else:
            self._store.give_back(slot)
