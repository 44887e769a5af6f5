"""The contract suite is itself tested: backends that break a promise must fail it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings

from sleepbackends import SleepBackendsError
from sleepbackends.control import Control
from sleepbackends.ledger import Block
from sleepbackends.mechanism import Fill
from sleepbackends.reports import DiscardReport
from sleepbackends.settings import BackendSettings
from sleepbackends.testing import BackendContractTests, SimulatedBackend


class ForgetsInRestore(SimulatedBackend):
    """Drops the saved copy before the resume has succeeded."""

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        for block in super().restore(blocks, control):
            self.forget(block)
            yield block


class LosesTheLastByte(SimulatedBackend):
    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        for block in super().save(blocks, control):
            self.saved[block.address] = self.saved[block.address][:-1] + b"\0"
            yield block


class LeavesStaleBytes(SimulatedBackend):
    def fill(self, block: Block, fill: Fill) -> None:
        self.mapped[block.address][: block.size_bytes // 2] = bytes(block.size_bytes // 2)


class SkipsABlock(SimulatedBackend):
    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        yield from super().save(blocks[:-1], control)


class UnmapsBeforeItFails(SimulatedBackend):
    """Gives memory back and raises all the same."""

    def unmap(self, block: Block) -> None:
        super().unmap(block)
        if block.size_bytes == 5:
            raise RuntimeError("too late")


class DiscardsNothing(SimulatedBackend):
    def discard(self, tags: Collection[str], *, control: Control | None = None) -> DiscardReport:
        return DiscardReport(backend=self.name, operation="discard", changed=True)


class KeepsMemory(SimulatedBackend):
    """Only pretends to unmap."""

    def unmap(self, block: Block) -> None:
        self.ghosts = [*getattr(self, "ghosts", []), self.mapped.pop(block.address)]

    @property
    def mapped_bytes(self) -> int:
        return super().mapped_bytes + sum(map(len, getattr(self, "ghosts", [])))


class MovesOnResume(SimulatedBackend):
    """Restores one block's bytes into another's place."""

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        blocks = list(blocks)
        if len(blocks) > 1:
            first, second = blocks[0].address, blocks[1].address
            size = min(blocks[0].size_bytes, blocks[1].size_bytes)
            copy = self.saved[second][:size] + self.saved[first][size:]
            self.saved[first] = copy
        yield from super().restore(blocks, control)


class NeverCounts(SimulatedBackend):
    """Forgets to report progress."""

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        return super().save(blocks, Control())


LIARS = {
    ForgetsInRestore: "test_resume",
    LosesTheLastByte: "test_level_1_keeps_contents",
    LeavesStaleBytes: "test_level_2_drops_weights",
    SkipsABlock: "test_level_1_keeps_contents",
    UnmapsBeforeItFails: "test_level_1_keeps_contents",
    DiscardsNothing: "test_discard_releases_the_named_tags_only",
    KeepsMemory: "test_memory_is_given_back",
    MovesOnResume: "test_level_1_keeps_contents",
    NeverCounts: "test_progress_ends_at_the_total",
}


def suite_of(backend: type[SimulatedBackend]) -> BackendContractTests:
    class Suite(BackendContractTests):
        # Finding the lie is enough here; making the example small takes minutes.
        random_settings = settings(
            BackendContractTests.random_settings,
            max_examples=600,
            phases=[Phase.generate],
            print_blob=False,
        )

        def make_backend(self, settings: BackendSettings) -> SimulatedBackend:
            return backend(None, settings)

        def used_bytes(self, backend: Any) -> int:
            return int(backend.mapped_bytes)

    return Suite()


def run(suite: BackendContractTests, test: str) -> None:
    if test == "test_resume":
        suite.test_resume("restore")
        return
    with suite.opened() as backend:
        method = getattr(suite, test)
        method(*([backend] if "backend" in method.__code__.co_varnames[:2] else []))


@pytest.mark.parametrize(("liar", "test"), list(LIARS.items()))
def test_a_lying_backend_fails(liar: type[SimulatedBackend], test: str) -> None:
    run(suite_of(SimulatedBackend), test)
    with pytest.raises((AssertionError, SleepBackendsError)):
        run(suite_of(liar), test)


@pytest.mark.parametrize(
    "liar", [ForgetsInRestore, LosesTheLastByte, LeavesStaleBytes, MovesOnResume]
)
def test_random_sequences_find_it_too(liar: type[SimulatedBackend]) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - hypothesis raises groups
        suite_of(liar).test_random_sequences()
    assert not isinstance(caught.value, KeyboardInterrupt)
