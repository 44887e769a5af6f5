"""What a suspend and a resume copy: chunks that are not saved yet, and everything back.

Before a chunk is copied, its fingerprint on the device is compared with that of the bytes that
are saved already. The device fingerprints one batch while the one before it is being copied,
so that looking costs a full copy next to nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from sleepbackends.control import Control
from sleepbackends.errors import MechanismError
from sleepbackends.ledger import Block
from sleepbackends.vmm.copies import Choices, Copies
from sleepbackends.vmm.fingerprint import Pending, Span
from sleepbackends.vmm.host_copy import Chunk, HostCopy
from sleepbackends.vmm.mover import AnyTransfer, Work
from sleepbackends.vmm.packing.layout import HEADER_BYTES, Choice
from sleepbackends.vmm.packing.packer import Packer
from sleepbackends.vmm.packing.transfer import Down, Packed, Up, check_whole
from sleepbackends.vmm.packing.unpacking import unpacked_pieces
from sleepbackends.vmm.verify import fingerprint_of_saved

logger = logging.getLogger(__name__)

BATCH_BYTES = 1 << 30
"""How much is fingerprinted by one call; an H200 reads it in 0.25 ms."""

BATCH_CHUNKS = 128
"""The most chunks of it."""

BATCHES_AHEAD = 2

CLEAN_BATCH_BYTES = 4 << 30
CLEAN_BATCHES_AHEAD = 7
"""The same as long as nothing has to be copied: then the unmapping is all there is to wait for, and
an H200's driver takes a few milliseconds more for that while kernels are being launched. So all of
them are, before it begins."""


@dataclass(slots=True)
class Dirty:
    """A chunk that is copied.

    Parameters
    ----------
    copy : HostCopy
        Where its block is saved.
    chunk : Chunk
        Which part of it.
    fingerprint : int or None
        Of its bytes on the device, where that can be had.
    packed : Packed, optional
        How it is packed, once that is known.
    """

    copy: HostCopy
    chunk: Chunk
    fingerprint: int | None
    packed: Packed | None = None

    @property
    def saved_bytes(self) -> int:
        """How many bytes of it are copied."""
        return saved_bytes(self.chunk, self.packed)

    def land(self, *, always_known: bool, known_at_once: bool) -> None:
        """Note what is saved now that the chunk has landed; see ``Batch.land``."""
        found = self.fingerprint
        if self.packed is not None:
            if not known_at_once:
                with self.chunk.saved.view(0, HEADER_BYTES) as header:
                    check_whole(header)
            # What the host has a fingerprint of are the packed bytes.
            if found is None and always_known:
                found = fingerprint_of_saved(self.chunk)
        elif known_at_once or (found is None and always_known):
            saved = self.chunk.saved.fingerprinting()()
            if found not in (None, saved):
                raise MechanismError(
                    f"the bytes near {self.chunk.span.address:#x} changed on their way",
                    tags=[self.copy.extent.tag],
                    hint="repeat the suspend, with nobody using the memory; if it fails again, "
                    "the device or its link is faulty",
                )
            found = saved
        self.chunk.fingerprint = found


@dataclass(slots=True)
class Batch:
    """Chunks of one device on their way to the host.

    Parameters
    ----------
    device : int
        Ordinal of the device.
    parts : list of (HostCopy, Chunk)
        The chunks, and where their blocks are saved.
    size_bytes : int
        Of all of them.
    blocks : list of Block
        Those that are saved with it: their last chunk is in it.
    dirty : list of Dirty
        The chunks that are not saved already, once that is known.
    """

    device: int
    parts: list[tuple[HostCopy, Chunk]] = field(default_factory=list)
    size_bytes: int = 0
    blocks: list[Block] = field(default_factory=list)
    dirty: list[Dirty] = field(default_factory=list)

    @property
    def dirty_bytes(self) -> int:
        """How much of it is saved by copies."""
        return sum([part.chunk.size_bytes for part in self.dirty])

    @property
    def spared_bytes(self) -> int:
        """By how much less is copied for them."""
        return sum([part.chunk.size_bytes - part.saved_bytes for part in self.dirty])

    def look(self, fingerprints: Sequence[int | None]) -> None:
        """Find out which chunks are dirty."""
        self.dirty = [
            Dirty(copy, chunk, fingerprint)
            for (copy, chunk), fingerprint in zip(self.parts, fingerprints, strict=True)
            if fingerprint is None or fingerprint != chunk.fingerprint
        ]

    def pack(self, packer: Packer, known: Choices) -> None:
        """Find out how the dirty chunks are packed, and to how many bytes."""
        chunks = [part.chunk for part in self.dirty]
        choices = choose(packer, self.device, chunks, known)
        found = packer.measure(self.device, [chunk.span for chunk in chunks], choices)
        for part, packed in zip(self.dirty, found, strict=True):
            part.packed = packed

    def work(self) -> Work[Batch]:
        """Return the copies to be made."""
        transfers: Iterable[AnyTransfer] = self._transfers() if self.dirty else ()
        return Work(self.device, transfers, self.size_bytes, self)

    def _transfers(self) -> Iterator[AnyTransfer]:
        for part in self.dirty:
            chunk, packed = part.chunk, part.packed
            chunk.overwrite(part.saved_bytes)
            if packed is None:
                yield from chunk.transfers()
            else:
                yield Down(chunk.span, chunk.saved, packed.layout, is_checked=True)

    def land(self, *, always_known: bool, known_at_once: bool) -> None:
        """Note what is saved now that it has landed.

        Parameters
        ----------
        always_known : bool
            Whether the host computes the fingerprint where the device cannot.
        known_at_once : bool
            Whether the host has it anyway, so that it is compared with the device's.

        Raises
        ------
        MechanismError
            If other bytes arrived than the device holds.
        """
        for part in self.dirty:
            part.land(always_known=always_known, known_at_once=known_at_once)


Fingerprint = Callable[[int, Sequence[Span]], Pending | None]
"""Has a device fingerprint memory; see ``Driver.fingerprint``."""


def to_save(
    fingerprint: Fingerprint,
    packer: Packer,
    pairs: Iterable[tuple[Block, HostCopy]],
    known: Choices,
    control: Control,
    make_writable: Callable[[Sequence[tuple[HostCopy, Chunk, int]]], None],
) -> Iterator[Work[Batch]]:
    """Make work of blocks that are to be saved, the devices in turn.

    ``make_writable`` is told which chunks will be overwritten, by how many bytes, some at a time.

    Each subject is to be told when it has landed. Blocks without chunks do not occur.
    """
    is_clean = False
    batches = _batches(pairs, lambda: CLEAN_BATCH_BYTES if is_clean else BATCH_BYTES)
    waiting = ((batch, _fingerprinting(fingerprint, batch)) for batch in batches)
    ahead = deque(islice(waiting, BATCHES_AHEAD))
    while ahead:
        batch, pending = ahead.popleft()
        with control.phase("fingerprint"):
            found = pending.result() if pending else [None] * len(batch.parts)
        batch.look(found)
        is_clean = not batch.dirty
        most = CLEAN_BATCHES_AHEAD if is_clean else BATCHES_AHEAD
        ahead.extend(islice(waiting, max(0, most - len(ahead))))
        if batch.dirty:
            with control.phase("survey"):
                batch.pack(packer, known)
            make_writable([(part.copy, part.chunk, part.saved_bytes) for part in batch.dirty])
        yield batch.work()


def saved_bytes(chunk: Chunk, packed: Packed | None) -> int:
    """Return how many bytes a chunk is saved as."""
    return chunk.size_bytes if packed is None else packed.size_bytes


def choose(
    packer: Packer,
    device: int,
    chunks: Sequence[Chunk],
    known: Choices,
    *,
    beside: bool = False,
) -> list[Choice | None]:
    """Find out how chunks of a device should be packed, where that is not known already."""
    unknown = [chunk for chunk in chunks if chunk not in known]
    spans = [chunk.span for chunk in unknown]
    found = dict(zip(unknown, packer.survey(device, spans, beside=beside), strict=True))
    return [found[chunk] if chunk in found else known[chunk] for chunk in chunks]


def _fingerprinting(fingerprint: Fingerprint, batch: Batch) -> Pending | None:
    return fingerprint(batch.device, [chunk.span for _, chunk in batch.parts])


def _batches(
    pairs: Iterable[tuple[Block, HostCopy]], most_bytes: Callable[[], int]
) -> Iterator[Batch]:
    by_device: dict[int, Batch] = {}
    for block, copy in pairs:
        device, last = copy.extent.device, copy.chunks[-1]
        for chunk in copy.chunks:
            batch = by_device.get(device)
            if batch is None:
                batch = by_device[device] = Batch(device)
            batch.parts.append((copy, chunk))
            batch.size_bytes += chunk.span.size_bytes
            if chunk is last:
                batch.blocks.append(block)
            if batch.size_bytes >= most_bytes() or len(batch.parts) >= BATCH_CHUNKS:
                yield by_device.pop(device)
    yield from by_device.values()


TOGETHER_BLOCKS = 32
"""The most blocks that are mapped by one call, and then copied."""

TOGETHER_BYTES = 64 << 20
"""How large they are in all, at least, unless there are so many: the link waits for the first."""


def together(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Cut blocks into what is mapped and restored together, each part as soon as it is taken."""
    some: list[Block] = []
    size_bytes = 0
    for block in blocks:
        some.append(block)
        size_bytes += block.size_bytes
        if size_bytes >= TOGETHER_BYTES or len(some) >= TOGETHER_BLOCKS:
            yield some
            some, size_bytes = [], 0
    if some:
        yield some


@dataclass(slots=True)
class Restored:
    """Blocks of one device on their way up.

    Parameters
    ----------
    blocks : sequence of Block
        Which ones.
    spared_bytes : int
        By how much less is copied for them than they hold.
    """

    blocks: Sequence[Block]
    spared_bytes: int = 0


def to_restore(blocks: Iterable[Block], copies: Copies, packer: Packer) -> Iterator[Work[Restored]]:
    """Make work of blocks that are to be restored, as they are taken."""
    for some in together(blocks):
        by_device: dict[int, list[Block]] = {}
        for block in some:
            by_device.setdefault(block.extra.device, []).append(block)
        for device, mine in by_device.items():
            found = [copies[block] for block in mine]
            chunks = [chunk for copy in found for chunk in copy.chunks]
            size_bytes = sum([chunk.span.size_bytes for chunk in chunks])
            restored = Restored(mine)
            yield Work(device, _transfers(chunks, packer, device, restored), size_bytes, restored)


def _transfers(
    chunks: Iterable[Chunk], packer: Packer, device: int, restored: Restored
) -> Iterator[AnyTransfer]:
    for chunk in chunks:
        copied_bytes = chunk.saved.size_bytes
        bench = packer.bench(device) if chunk.is_packed else None
        if bench is not None and copied_bytes <= bench.size_bytes:
            restored.spared_bytes += chunk.size_bytes - copied_bytes
            yield Up(chunk.span, chunk.saved)
        elif chunk.is_packed:
            yield from unpacked_pieces(chunk.span, chunk.saved)
        else:
            yield from chunk.transfers()


def learn(fingerprint: Fingerprint, copies: Iterable[HostCopy]) -> None:
    """Find out the fingerprints that are not known of what was just restored.

    Chunks were saved without where the device could not compute them then. Where it still
    cannot, they stay unknown, and are copied again by the next suspend.
    """
    unknown: dict[int, list[Chunk]] = {}
    for copy in copies:
        chunks = [chunk for chunk in copy.chunks if chunk.fingerprint is None]
        unknown.setdefault(copy.extent.device, []).extend(chunks)
    for device, chunks in unknown.items():
        for first in range(0, len(chunks), BATCH_CHUNKS):
            some = chunks[first : first + BATCH_CHUNKS]
            try:
                pending = fingerprint(device, [chunk.span for chunk in some])
                found = pending.result() if pending else [None] * len(some)
            except MechanismError as error:
                logger.info("nothing is known of what device %d restored: %s", device, error)
                break
            for chunk, each in zip(some, found, strict=True):
                chunk.fingerprint = each
