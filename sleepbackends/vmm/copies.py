"""Saved bytes of blocks, and what is known about them.

A copy is kept after its block is awake again, where the policy of the store says so. Each
chunk of it has a fingerprint; a chunk whose bytes on the device have the same one need not be
copied again. Whether a copy is owed to its block is told by the ledger; all others are a
cache, which goes as soon as its room is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from sleepbackends.errors import NoRoomError
from sleepbackends.hostmemory import driver as host
from sleepbackends.ledger import Block
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.host_copy import Chunk, HostCopy, cut, laid_out
from sleepbackends.vmm.packing.layout import Choice
from sleepbackends.vmm.packing.packer import Packer, room_bytes
from sleepbackends.vmm.places import Saved, Slot, Store

CHUNK_BYTES = 32 << 20
"""What is compared, and copied or not, as one, where the store has room for so much at a time."""

LiveRanges = Callable[[int], Sequence[tuple[int, int]]]
"""Lists what of an extent, given by its number, is allocated: offsets and sizes."""

Choices = Mapping[Chunk, Choice | None]
"""How chunks should be packed, for all that is known; None for those that should not."""

ResultT = TypeVar("ResultT")

Spare = Callable[[], Collection[Block]]
"""Lists blocks whose copies may go for the room of others; asked only if room is missing."""


class Copies:
    """The copies of one backend, by address of their blocks.

    Parameters
    ----------
    store : Store
        Where they are.
    packer : Packer
        Tells what will be packed, so that it needs less room.
    """

    def __init__(self, store: Store, packer: Packer) -> None:
        self._store = store
        self._packer = packer
        self._copies: dict[int, HostCopy] = {}
        # Devices on which work of ours may still be under way, and the room that it may
        # still use although it was given back.
        self._unsettled: set[int] = set()
        self._held_back: list[tuple[int, Slot]] = []

    def __getitem__(self, block: Block) -> HostCopy:
        return self._copies[block.address]

    def __contains__(self, block: Block) -> bool:
        return block.address in self._copies

    @property
    def chunk_limit_bytes(self) -> int:
        """The most bytes of a chunk."""
        return min(CHUNK_BYTES, self._store.chunk_limit_bytes or CHUNK_BYTES)

    def check_room(self, blocks: Sequence[Block]) -> None:
        """Check that all these blocks can be saved as they are, beside the copies there are.

        Raises
        ------
        NoRoomError
            If they cannot.
        """
        self._store.check_room(self._needed_bytes(self._new(blocks)))

    def check_room_packed(
        self, blocks: Sequence[Block], spare: Spare, live_ranges: LiveRanges
    ) -> None:
        """Check that all these blocks can be saved packed, if need be instead of spare copies.

        A sample of the bytes tells how well they pack: what passes fits as far as the sample does
        not mislead, and a suspend that finds out better is undone.

        Raises
        ------
        NoRoomError
            If they cannot.
        """
        new = self._new(blocks)
        outlook = self._outlook(new, live_ranges, at_ease=False)
        packed = sum(sum(map(self._room_bytes, each)) for each in outlook)
        needed = min(self._needed_bytes(new), packed)
        self._with_room(spare, lambda: self._store.check_room(needed))

    def prepare(
        self,
        blocks: Sequence[Block],
        spare: Spare,
        live_ranges: LiveRanges,
        *,
        at_ease: bool = False,
    ) -> Choices:
        """Have a copy for each block, with or without contents; see ``Store.take``.

        Returns
        -------
        mapping of Chunk to Choice or None
            What was found out about the contents of those that are new.

        Raises
        ------
        NoRoomError
            If there is no room; copies that were there are still there, unless spare.
        """
        new = self._new(blocks)
        for block in new:
            self.drop(block)
        outlook = self._outlook(new, live_ranges, at_ease=at_ease)
        sizes = [list(map(self._room_bytes, each)) for each in outlook]
        wanted = list(map(sum, sizes))
        devices = [block.extra.device for block in new]
        slots = self._with_room(
            spare, lambda: self._store.take(wanted, devices=devices, at_ease=at_ease)
        )
        found: dict[Chunk, Choice | None] = {}
        for block, each, rooms, slot in zip(new, outlook, sizes, slots, strict=True):
            spans = [span for span, _ in each]
            chunks = list(laid_out(spans, rooms, slot.ranges, self._store.unit_bytes))
            self._copies[block.address] = HostCopy(block.extra, chunks)
            choices = dict(each)
            found |= {chunk: choices.get(chunk.span) for chunk in chunks}
        return found

    def _outlook(
        self, blocks: Sequence[Block], live_ranges: LiveRanges, *, at_ease: bool
    ) -> list[list[tuple[Span, Choice | None]]]:
        """Cut each block into spans, and find out how each should be packed."""
        cuts = [cut(b.address, live_ranges(b.extra.id), self.chunk_limit_bytes) for b in blocks]
        by_device: dict[int, list[Span]] = {}
        for block, spans in zip(blocks, cuts, strict=True):
            by_device.setdefault(block.extra.device, []).extend(spans)
        found = {
            device: iter(self._packer.survey(device, spans, beside=at_ease))
            for device, spans in by_device.items()
        }
        return [
            [(span, next(found[block.extra.device])) for span in spans]
            for block, spans in zip(blocks, cuts, strict=True)
        ]

    def _room_bytes(self, outlook: tuple[Span, Choice | None]) -> int:
        span, choice = outlook
        size_bytes = span.size_bytes
        if choice is not None:
            size_bytes = room_bytes(size_bytes, choice.packed_bytes(size_bytes))
        return self._round(size_bytes)

    def all(self) -> list[HostCopy]:
        """List the copies there are."""
        return list(self._copies.values())

    def holds(self, copy: HostCopy) -> bool:
        """Tell whether a copy was not dropped or replaced."""
        return self._copies.get(copy.extent.address) is copy

    def make_writable(
        self, parts: Sequence[tuple[HostCopy, Chunk, int]], spare: Spare = lambda: ()
    ) -> None:
        """Have room of their own for chunks that are to be overwritten by so many bytes each.

        Raises
        ------
        NoRoomError
            If there is no room; the saved bytes of all chunks are still there, unless spare.
        """
        if not parts:
            return
        rooms = [chunk.room for _, chunk, _ in parts]
        sizes = [_enough(chunk, saved_bytes) for _, chunk, saved_bytes in parts]
        devices = [copy.extent.device for copy, _, _ in parts]
        own = self._with_room(spare, lambda: self._store.writable(rooms, sizes, devices=devices))
        for (copy, chunk, saved_bytes), room in zip(parts, own, strict=True):
            before, chunk.room = chunk.room, room
            if room[0] is not before[0]:
                chunk.overwrite(saved_bytes)
                self._give_back(copy.extent.device, Slot(before))

    def move(self, copy: HostCopy, chunk: Chunk, saved: Saved) -> None:
        """Say that a chunk's bytes are elsewhere now, and give back where they were."""
        before, chunk.room, chunk.saved = chunk.room, [saved], saved
        self._give_back(copy.extent.device, Slot(before))

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

    def _new(self, blocks: Sequence[Block]) -> list[Block]:
        return [block for block in blocks if not self._usable(block)]

    def _needed_bytes(self, blocks: Sequence[Block]) -> int:
        return sum(self._round(block.size_bytes) for block in blocks)

    def _usable(self, block: Block) -> bool:
        copy = self._copies.get(block.address)
        return copy is not None and copy.fits(block.extra)

    def _with_room(self, spare: Spare, attempt: Callable[[], ResultT]) -> ResultT:
        """Try, and if there is no room, again without spare copies, if there are any."""
        try:
            return attempt()
        except NoRoomError:
            blocks = spare()
            if not blocks:
                raise
            for block in blocks:
                self.drop(block)
            return attempt()

    def _give_back(self, device: int, slot: Slot) -> None:
        if device in self._unsettled:
            self._held_back.append((device, slot))
        else:
            self._store.give_back(slot)


def _enough(chunk: Chunk, saved_bytes: int) -> int:
    """Return how much room a chunk should have: what it has, if that is enough."""
    if sum([part.size_bytes for part in chunk.room]) >= saved_bytes:
        return saved_bytes
    return room_bytes(chunk.size_bytes, saved_bytes)
