"""The ledger: every block of a backend, and the only place that changes a residency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sleepbackends.residency import Move, Placement, Residency, moved
from sleepbackends.state import BackendState, TagState


@dataclass(eq=False)
class Block:
    """One allocation.

    Parameters
    ----------
    address : int
        Where it starts; never changes.
    size_bytes : int
        How many bytes the user asked for. A mechanism that maps whole pages rounds up
        by itself.
    tag : str
        The lifetime policy it belongs to.
    device : str
        ``"cpu"``, ``"cuda:0"``, ...
    extra : object
        The mechanism's own data about this block.
    """

    address: int
    size_bytes: int
    tag: str
    device: str = "cpu"
    extra: Any = None
    placement: Placement = Placement()  # noqa: RUF009 - a tuple, which nobody can change

    @property
    def residency(self) -> Residency:
        """Where its bytes are."""
        return self.placement.residency


class Ledger:
    """Blocks by address, epochs by tag, and snapshots of both.

    Only the holder of the backend's transition lock writes. Readers take no lock at all:
    a finalizer that the garbage collector runs in the middle of a reader may free a block,
    and any lock that both need would deadlock there.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._epochs: dict[str, int] = {}
        self._version = object()
        self._cached: tuple[object, BackendState] | None = None

    def register_tag(self, tag: str) -> None:
        """Make a tag known before its first block."""
        self._epochs.setdefault(tag, 0)
        self._touch()

    def add(self, block: Block) -> None:
        """Enter a new block."""
        self._epochs.setdefault(block.tag, 0)
        self._blocks[block.address] = block
        self._touch()

    def remove(self, block: Block) -> None:
        """Strike a freed block out."""
        self._blocks.pop(block.address, None)
        self._touch()

    def get(self, address: int) -> Block | None:
        """Return the block that starts at the address."""
        return self._blocks.get(address)

    def containing(self, address: int) -> Block | None:
        """Return the block that the address lies in, if it lies in one."""
        return next(
            (b for b in self.blocks() if b.address <= address < b.address + b.size_bytes), None
        )

    def blocks(self, tags: Collection[str] | None = None) -> list[Block]:
        """Return the blocks of some tags, or all, in order of allocation."""
        blocks = list(self._blocks.values())
        return blocks if tags is None else [block for block in blocks if block.tag in tags]

    def tags(self) -> frozenset[str]:
        """Return every tag that was ever registered."""
        return frozenset(list(self._epochs))

    def apply(self, move: Move, *blocks: Block) -> None:
        """Record a move that has happened to some blocks.

        Raises
        ------
        PolicyConflictError
            If the transition table has no such move for one of them; it and those after
            it are unchanged.
        """
        try:
            for block in blocks:
                block.placement = moved(move, block.placement)
        finally:
            self._touch()

    def strand(self, block: Block) -> None:
        """Record that a block stayed mapped although undoing its resume failed."""
        block.placement = block.placement._replace(mapped=True, stranded=True)
        self._touch()

    def bump_epochs(self, blocks: Iterable[Block]) -> None:
        """Record that contents of these blocks' tags were dropped."""
        for tag in {block.tag for block in blocks}:
            self._epochs[tag] += 1
        self._touch()

    def state(self) -> BackendState:
        """Return a snapshot; cached until something changes."""
        version, cached = self._version, self._cached
        if cached is None or cached[0] is not version:
            cached = (version, self._count())
            self._cached = cached
        return cached[1]

    def _touch(self) -> None:
        # Last of every change: a snapshot that saw half of it carries the older version.
        self._version = object()

    def _count(self) -> BackendState:
        epochs = dict(self._epochs)
        found: dict[tuple[str, Placement], list[int]] = {}
        for block in self.blocks():
            key = (block.tag, block.placement)
            if key in found:
                found[key].append(block.size_bytes)
            else:
                found[key] = [block.size_bytes]
        blocks: Counter[str] = Counter()
        by_tag: dict[str, Counter[str]] = {tag: Counter() for tag in epochs}
        for (tag, placement), sizes in found.items():
            if tag in by_tag:  # not registered since the epochs were copied
                blocks[tag] += len(sizes)
                by_tag[tag][f"{placement.residency.value}_bytes"] += sum(sizes)
        return BackendState(
            MappingProxyType(
                {
                    tag: TagState(**by_tag[tag], blocks=blocks[tag], epoch=epoch)
                    for tag, epoch in epochs.items()
                }
            )
        )
