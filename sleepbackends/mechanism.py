"""What the author of a backend writes: how bytes are saved, unmapped and brought back.

``BaseBackend`` decides what happens to which block, in which order, and what is undone
when a step fails; these methods do one step each and know nothing of tags, levels or
policies. They are called by one thread at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

from sleepbackends.control import Control
from sleepbackends.ledger import Block


class Fill(str, Enum):
    """What memory holds when it is mapped again after its contents were dropped."""

    ZERO = "zero"
    POISON = "poison"
    """0xA5 in every byte, so that use of undefined contents shows in tests."""
    NONE = "none"
    """Whatever the mechanism finds there."""


POISON_BYTE = 0xA5


class Mechanism(ABC):
    """The steps of a transition, in the order in which they are called.

    Suspend: ``synchronize``, ``check_room_to_save``, ``save``, ``unmap`` for each block as
    soon as it is saved. Resume: ``reserve``, ``restore`` with ``map`` for each block just
    before it is restored, ``map`` and ``fill`` for those without saved bytes,
    ``synchronize``, ``forget``.

    A mechanism with many small blocks may take several at once: ``batches``, ``unmap_all``,
    ``map_all``, and sequences of blocks from ``save`` and ``restore``.
    """

    def begin(self) -> None:
        """Get ready for a transition; called with the transition lock held.

        A mechanism whose blocks come and go outside of Python brings the ledger up to date.
        """

    def end(self) -> None:
        """Follow up on ``begin``, however the transition ended. Must not raise."""

    def synchronize(self, blocks: Sequence[Block]) -> None:
        """Wait until nothing that was queued still reads or writes these blocks."""

    def check_room_to_save(self, blocks: Sequence[Block]) -> None:
        """Check, before anything changes, that there is room for the saved bytes.

        There may be no blocks, when a suspend only drops contents.

        Raises
        ------
        NoRoomError
            If there is not.
        """

    @abstractmethod
    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block | Sequence[Block]]:
        """Copy the bytes of the blocks to safety, and yield each block once it is safe.

        Blocks that became safe together may be yielded as one sequence. What was yielded is
        unmapped before the next is asked for. Call
        ``control.advance`` with the bytes done as you go; it raises when the deadline has
        passed. If this raises, or is closed half-way, ``retire`` is called for every block
        once it is mapped.
        """

    def saving_is_certain(self) -> bool:
        """Tell whether nothing but the loss of the device can stop the save under way.

        Then contents that are to be dropped may go while the rest is still being saved.
        """
        return False

    @abstractmethod
    def unmap(self, block: Block) -> None:
        """Give the block's memory back and keep its address range.

        If this raises, the block must still be mapped with its bytes intact.
        """

    def batches(self, blocks: Sequence[Block]) -> Iterable[Sequence[Block]]:
        """Cut blocks, in their order, into what is mapped or unmapped at once: one each."""
        return ([block] for block in blocks)

    def unmap_all(self, blocks: Sequence[Block], done: list[Block]) -> None:
        """Unmap some blocks, and append each to ``done`` that was, whatever is raised."""
        for block in blocks:
            self.unmap(block)
            done.append(block)

    def reserve(self, blocks: Sequence[Block]) -> None:
        """Take, or make sure of, the memory of all these blocks before the first is mapped.

        Raises
        ------
        NoRoomError
            If there is not enough for all of them; nothing was taken.
        """

    def unreserve(self, blocks: Sequence[Block]) -> None:
        """Give back what ``reserve`` took for these blocks, which were not mapped."""

    @abstractmethod
    def map(self, block: Block) -> None:
        """Put memory behind the block's address again.

        If this raises, the block must be unmapped.
        """

    def map_all(self, blocks: Sequence[Block], done: list[Block]) -> None:
        """Map some blocks, and append each to ``done`` that was, whatever is raised."""
        for block in blocks:
            self.map(block)
            done.append(block)

    @abstractmethod
    def restore(
        self, blocks: Iterable[Block], control: Control
    ) -> Iterator[Block | Sequence[Block]]:
        """Copy saved bytes back, and yield each block once it is done, or several at once.

        A block is mapped when it is taken from ``blocks``, and the rest of the resume when
        the last was taken: a mechanism that queues its copies does both at once. One that
        needs to see all blocks first makes a list. The saved copy must stay until
        ``forget``: a later step may fail.

        Raises
        ------
        ContentsLostError
            If saved bytes do not match what was saved; ``addresses`` names the blocks.
        """

    @abstractmethod
    def fill(self, block: Block, fill: Fill) -> None:
        """Fill a block that was just mapped and has no contents to restore."""

    @abstractmethod
    def forget(self, block: Block) -> None:
        """Drop the saved copy of a block, if there is one. Must not raise."""

    def retire(self, block: Block) -> None:
        """Keep or drop the saved copy of a block that is mapped with its contents. Must not raise.

        A mechanism that can tell what changed since may use it for the next save.
        """
        self.forget(block)

    @abstractmethod
    def release(self, block: Block) -> None:
        """Give back a block for good: memory if mapped, saved copy, address range."""

    def shut_down(self) -> None:
        """Give back what the mechanism holds for itself. Called once, by ``close()``."""
