"""What a suspend and a resume copy: chunks that are not saved yet, and everything back.

Before a chunk is copied, its fingerprint on the device is compared with that of the bytes that
are saved already. The device fingerprints one batch while the one before it is being copied,
so that looking costs a full copy next to nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from sleepbackends.control import Control
from sleepbackends.errors import MechanismError
from sleepbackends.ledger import Block
from sleepbackends.vmm.copies import Chunk, Copies, HostCopy
from sleepbackends.vmm.driver import Driver
from sleepbackends.vmm.fingerprint import Pending
from sleepbackends.vmm.mover import Work
from sleepbackends.vmm.places import Place

BATCH_BYTES = 1 << 30
"""How much is fingerprinted by one call; an H200 reads it in 0.25 ms."""

BATCH_CHUNKS = 128
"""The most chunks of it."""

BATCHES_AHEAD = 4


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
    """

    copy: HostCopy
    chunk: Chunk
    fingerprint: int | None

    def land(self, *, always_known: bool, known_at_once: bool) -> None:
        """Note what is saved now that the chunk has landed; see ``Batch.land``."""
        found = self.fingerprint
        if known_at_once or (found is None and always_known):
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
        """How much of it is copied."""
        return sum([part.chunk.size_bytes for part in self.dirty])

    def look(self, fingerprints: Sequence[int | None]) -> None:
        """Find out which chunks are dirty."""
        self.dirty = [
            Dirty(copy, chunk, fingerprint)
            for (copy, chunk), fingerprint in zip(self.parts, fingerprints, strict=True)
            if fingerprint is None or fingerprint != chunk.fingerprint
        ]

    def work(self) -> Work[Batch]:
        """Return the copies to be made."""
        transfers: Iterable[tuple[int, Place]] = self._transfers() if self.dirty else ()
        return Work(self.device, transfers, self.size_bytes, self)

    def _transfers(self) -> Iterator[tuple[int, Place]]:
        for part in self.dirty:
            part.chunk.overwrite()
            yield from part.chunk.transfers()

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


def to_save(
    driver: Driver,
    pairs: Iterable[tuple[Block, HostCopy]],
    control: Control,
    make_writable: Callable[[Sequence[tuple[HostCopy, Chunk]]], None],
) -> Iterator[Work[Batch]]:
    """Make work of blocks that are to be saved, the devices in turn.

    ``make_writable`` is told which chunks will be overwritten, some at a time.

    Each subject is to be told when it has landed. Blocks without chunks do not occur.
    """
    waiting = ((batch, _fingerprinting(driver, batch)) for batch in _batches(pairs))
    ahead = deque(islice(waiting, BATCHES_AHEAD))
    while ahead:
        batch, pending = ahead.popleft()
        ahead.extend(islice(waiting, 1))
        with control.phase("fingerprint"):
            found = pending.result() if pending else [None] * len(batch.parts)
        batch.look(found)
        make_writable([(part.copy, part.chunk) for part in batch.dirty])
        yield batch.work()


def _fingerprinting(driver: Driver, batch: Batch) -> Pending | None:
    return driver.fingerprint(batch.device, [chunk.span for _, chunk in batch.parts])


def _batches(pairs: Iterable[tuple[Block, HostCopy]]) -> Iterator[Batch]:
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
            if batch.size_bytes >= BATCH_BYTES or len(batch.parts) >= BATCH_CHUNKS:
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


def to_restore(blocks: Iterable[Block], copies: Copies) -> Iterator[Work[list[Block]]]:
    """Make work of blocks that are to be restored, as they are taken."""
    for some in together(blocks):
        by_device: dict[int, list[Block]] = {}
        for block in some:
            by_device.setdefault(block.extra.device, []).append(block)
        for device, mine in by_device.items():
            found = [copies[block] for block in mine]
            chunks = [chunk for copy in found for chunk in copy.chunks]
            size_bytes = sum([chunk.span.size_bytes for chunk in chunks])
            yield Work(device, _transfers(chunks), size_bytes, mine)


def _transfers(chunks: Iterable[Chunk]) -> Iterator[tuple[int, Place]]:
    for chunk in chunks:
        yield from chunk.transfers()
