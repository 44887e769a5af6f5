"""What a suspend and a resume copy: chunks that are not saved yet, and everything back.

Before a chunk is copied, its fingerprint on the device is compared with that of the bytes that
are saved already. The device fingerprints one batch while the one before it is being copied,
so that looking costs a full copy next to nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest

from sleepbackends.control import Control
from sleepbackends.errors import MechanismError
from sleepbackends.ledger import Block
from sleepbackends.vmm.copies import Chunk, HostCopy
from sleepbackends.vmm.driver import Driver
from sleepbackends.vmm.mover import Work

BATCH_CHUNKS = 32
"""How many chunks are fingerprinted by one call; an H200 reads 1 GiB in 0.25 ms."""

BATCHES_AHEAD = 4


@dataclass
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
    clean : bool
        Whether its bytes were saved already.
    """

    block: Block
    copy: HostCopy
    chunk: Chunk
    last: bool
    clean: bool = False
    fingerprints: Fingerprints = field(init=False)
    number: int = field(init=False)

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
        found = self.fingerprints.found[self.number]
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

    def look(self) -> None:
        """Find out whether it is clean."""
        known = self.chunk.fingerprint
        self.clean = known is not None and known == self.fingerprints.found[self.number]

    def work(self) -> Work[Saving]:
        """Return the copies to be made: none if it is clean."""
        if not self.clean:
            self.chunk.overwrite()
        transfers = iter(()) if self.clean else self.copy.transfers(self.chunk)
        return Work(self.copy.extent.device, transfers, self.chunk.size_bytes, self)


class Fingerprints:
    """Fingerprints on the device of some chunks of one device, being computed.

    Parameters
    ----------
    driver : Driver
        Computes them, or not.
    parts : sequence of Saving
        The chunks, all of one device.
    """

    def __init__(self, driver: Driver, parts: Sequence[Saving]) -> None:
        spans = [part.copy.span(part.chunk) for part in parts]
        self._count = len(parts)
        self._pending = driver.fingerprint(parts[0].copy.extent.device, spans)
        self._found: Sequence[int | None] | None = None

    @property
    def found(self) -> Sequence[int | None]:
        """One for each chunk, or None where they cannot be had; waits for them."""
        if self._found is None:
            pending = self._pending
            self._found = pending.result() if pending else [None] * self._count
        return self._found


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
    waiting = (_fingerprinted(driver, parts) for parts in _batches(pairs))
    ahead = deque(islice(waiting, BATCHES_AHEAD))
    while ahead:
        parts = ahead.popleft()
        ahead.extend(islice(waiting, 1))
        with control.phase("fingerprint"):
            for part in parts:
                part.look()
        make_writable([(part.copy, part.chunk) for part in parts if not part.clean])
        yield from (part.work() for part in parts)


def _fingerprinted(driver: Driver, parts: Sequence[Saving]) -> Sequence[Saving]:
    # The parts know of them and not the other way round, so that what is dropped unread goes.
    fingerprints = Fingerprints(driver, parts)
    for number, part in enumerate(parts):
        part.fingerprints, part.number = fingerprints, number
    return parts


def _batches(pairs: Iterable[tuple[Block, HostCopy]]) -> Iterator[Sequence[Saving]]:
    by_device: dict[int, list[Saving]] = {}
    for block, copy in pairs:
        parts = by_device.setdefault(copy.extent.device, [])
        parts += (Saving(block, copy, chunk, chunk is copy.chunks[-1]) for chunk in copy.chunks)
    cut = (
        [parts[i : i + BATCH_CHUNKS] for i in range(0, len(parts), BATCH_CHUNKS)]
        for parts in by_device.values()
    )
    turns = chain.from_iterable(zip_longest(*cut, fillvalue=()))
    return (parts for parts in turns if parts)


def to_restore(pairs: Iterable[tuple[Block, HostCopy]]) -> Iterator[Work[Block]]:
    """Make work of blocks that are to be restored, each when it is asked for."""
    for block, copy in pairs:
        transfers = chain.from_iterable(map(copy.transfers, copy.chunks))
        size_bytes = sum(chunk.size_bytes for chunk in copy.chunks)
        yield Work(copy.extent.device, transfers, size_bytes, block)
