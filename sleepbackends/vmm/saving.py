"""What a suspend and a resume copy: chunks that are not saved yet, and everything back.

Before a chunk is copied, its fingerprint on the device is compared with that of the bytes that
are saved already. The device fingerprints one batch while the one before it is being copied,
so that looking costs a full copy next to nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from sleepbackends.control import Control
from sleepbackends.errors import MechanismError
from sleepbackends.ledger import Block
from sleepbackends.vmm.copies import Chunk, HostCopy
from sleepbackends.vmm.driver import Driver
from sleepbackends.vmm.fingerprint import Pending
from sleepbackends.vmm.mover import Work
from sleepbackends.vmm.places import Place

BATCH_CHUNKS = 32
"""How many chunks are fingerprinted by one call; an H200 reads 1 GiB in 0.25 ms."""

BATCHES_AHEAD = 4


@dataclass(slots=True)
class Saving:
    """A chunk on its way to the host.

    Parameters
    ----------
    block : Block
        Whose it is.
    copy : HostCopy
        Where the block is saved.
    chunk : Chunk
        Which part of it.
    last : bool
        Whether the block is saved with it.
    fingerprint : int or None
        Of its bytes on the device, where that can be had.
    clean : bool
        Whether these bytes were saved already.
    """

    block: Block
    copy: HostCopy
    chunk: Chunk
    last: bool
    fingerprint: int | None = None
    clean: bool = False

    def land(self, *, always_known: bool, known_at_once: bool) -> None:
        """Note what is saved now that the chunk has landed.

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
        if self.clean:
            return
        found = self.fingerprint
        if known_at_once or (found is None and always_known):
            saved = self.chunk.saved.fingerprinting()()
            if found not in (None, saved):
                raise MechanismError(
                    f"the bytes near {self.copy.span(self.chunk).address:#x} changed on their way",
                    tags=[self.block.tag],
                    hint="repeat the suspend, with nobody using the memory; if it fails again, "
                    "the device or its link is faulty",
                )
            found = saved
        self.chunk.fingerprint = found

    def look(self, fingerprint: int | None) -> None:
        """Find out whether it is clean."""
        self.fingerprint = fingerprint
        self.clean = fingerprint is not None and fingerprint == self.chunk.fingerprint

    def work(self) -> Work[Saving]:
        """Return the copies to be made: none if it is clean."""
        transfers: Iterable[tuple[int, Place]] = ()
        if not self.clean:
            self.chunk.overwrite()
            transfers = self.copy.transfers([self.chunk])
        return Work(self.copy.extent.device, transfers, self.chunk.size_bytes, self)


def to_save(
    driver: Driver,
    pairs: Iterable[tuple[Block, HostCopy]],
    control: Control,
    make_writable: Callable[[Sequence[tuple[HostCopy, Chunk]]], None],
) -> Iterator[Work[Saving]]:
    """Make work of blocks that are to be saved, the devices in turn.

    ``make_writable`` is told which chunks will be overwritten, some at a time.

    Each subject is to be told when it has landed. Blocks without chunks do not occur.
    """
    waiting = ((parts, _fingerprinting(driver, parts)) for parts in _batches(pairs))
    ahead = deque(islice(waiting, BATCHES_AHEAD))
    while ahead:
        parts, pending = ahead.popleft()
        ahead.extend(islice(waiting, 1))
        with control.phase("fingerprint"):
            found = pending.result() if pending else [None] * len(parts)
        for part, fingerprint in zip(parts, found, strict=True):
            part.look(fingerprint)
        make_writable([(part.copy, part.chunk) for part in parts if not part.clean])
        for part in parts:
            yield part.work()


def _fingerprinting(driver: Driver, parts: Sequence[Saving]) -> Pending | None:
    spans = [part.copy.span(part.chunk) for part in parts]
    return driver.fingerprint(parts[0].copy.extent.device, spans)


def _batches(pairs: Iterable[tuple[Block, HostCopy]]) -> Iterator[Sequence[Saving]]:
    """Gather chunks of one device each."""
    by_device: dict[int, list[Saving]] = {}
    for block, copy in pairs:
        device, last = copy.extent.device, copy.chunks[-1]
        for chunk in copy.chunks:
            parts = by_device.setdefault(device, [])
            parts.append(Saving(block, copy, chunk, chunk is last))
            if len(parts) == BATCH_CHUNKS:
                yield by_device.pop(device)
    yield from by_device.values()


def to_restore(pairs: Iterable[tuple[Block, HostCopy]]) -> Iterator[Work[Block]]:
    """Make work of blocks that are to be restored, each when it is asked for."""
    for block, copy in pairs:
        size_bytes = sum([chunk.size_bytes for chunk in copy.chunks])
        yield Work(copy.extent.device, copy.transfers(copy.chunks), size_bytes, block)
