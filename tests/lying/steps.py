"""Lies of the mechanism: a step does less, more or something else than it says."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sleepbackends.control import Control
from sleepbackends.ledger import Block
from sleepbackends.mechanism import Fill
from sleepbackends.testing import SimulatedBackend


class LosesTheLastPage(SimulatedBackend):
    """Saves whole pages only."""

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        for block in super().save(blocks, control):
            whole = block.size_bytes // 4096 * 4096
            self.saved[block.address] = self.saved[block.address][:whole].ljust(
                block.size_bytes, b"\0"
            )
            yield block


class SkipsABlock(SimulatedBackend):
    """Saves all blocks but the last."""

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        yield from super().save(blocks[:-1], control)


class KeepsTheFirstCopy(SimulatedBackend):
    """Takes what was saved once for what is to be saved now."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.first: dict[int, bytes] = {}

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        for block in super().save(blocks, control):
            copy = self.first.setdefault(block.address, self.saved[block.address])
            self.saved[block.address] = copy
            yield block


class ForgetsInRestore(SimulatedBackend):
    """Drops the saved copy before the resume has succeeded."""

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        for block in super().restore(blocks, control):
            self.forget(block)
            yield block


class SwapsBlocks(SimulatedBackend):
    """Restores one block's bytes into another's place."""

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        blocks = list(blocks)
        if len(blocks) > 1:
            first, second = blocks[0].address, blocks[1].address
            size = min(blocks[0].size_bytes, blocks[1].size_bytes)
            self.saved[first] = self.saved[second][:size] + self.saved[first][size:]
        yield from super().restore(blocks, control)


class LeavesStaleBytes(SimulatedBackend):
    """Zeroes half of what comes back without contents."""

    def fill(self, block: Block, fill: Fill) -> None:
        self.device.memory(block.address)[: block.size_bytes // 2] = bytes(block.size_bytes // 2)


class UnmapsBeforeItFails(SimulatedBackend):
    """Gives memory back and raises all the same."""

    def unmap(self, block: Block) -> None:
        super().unmap(block)
        if block.size_bytes == 5:
            raise RuntimeError("too late")


class KeepsMemory(SimulatedBackend):
    """Only pretends to unmap."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ghosts: list[bytearray] = []

    def unmap(self, block: Block) -> None:
        self.ghosts.append(self.device.mapped.pop(block.address))

    @property
    def mapped_bytes(self) -> int:
        return super().mapped_bytes + sum(map(len, self.ghosts))


class KeepsFreedMemory(KeepsMemory):
    """Gives memory back when it sleeps, and not when it is freed."""

    def unmap(self, block: Block) -> None:
        SimulatedBackend.unmap(self, block)

    def release(self, block: Block) -> None:
        if block.placement.mapped:
            self.ghosts.append(self.device.mapped.pop(block.address))
        self.forget(block)


class ReleasesTwice(SimulatedBackend):
    """Gives memory back when it is freed, although its sleep has done so already."""

    def release(self, block: Block) -> None:
        self.device.unmap(block.address)
        self.forget(block)


class ReleasesUncountedTwice(SimulatedBackend):
    """As before, on a device that takes whatever it is given."""

    given_twice_bytes = 0

    def release(self, block: Block) -> None:
        if not block.placement.mapped:
            self.given_twice_bytes += block.size_bytes
        super().release(block)

    @property
    def mapped_bytes(self) -> int:
        return super().mapped_bytes - self.given_twice_bytes


class NeverCounts(SimulatedBackend):
    """Forgets to report progress."""

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        return super().save(blocks, Control())


class NeverLooksAtTheDeadline(SimulatedBackend):
    """Goes on whatever the time."""

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        for block in super().save(blocks, Control()):
            progress = control.progress
            done = progress.done_bytes + block.size_bytes
            control._publish(type(progress)("suspend", done, progress.total_bytes))
            yield block


class ExitsTheProcess(SimulatedBackend):
    """Gives up on everything."""

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        raise SystemExit("cannot save")


_ONE_AT_A_TIME = threading.Lock()


class SharesALock(SimulatedBackend):
    """Lets one backend of all that there are work on its device."""

    def begin(self) -> None:
        _ONE_AT_A_TIME.acquire()

    def end(self) -> None:
        _ONE_AT_A_TIME.release()
