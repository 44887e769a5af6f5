"""The order of a transition's steps, and what happens beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from typing import TypeVar

import pytest

from sleepbackends import Control, MechanismError, Residency, TransitionTimeoutError
from sleepbackends.ledger import Block
from sleepbackends.mechanism import Fill
from sleepbackends.testing import FaultInjector, SimulatedBackend

SIZE = 1000


class Certain(SimulatedBackend):
    """Has queued every copy as soon as the first block is saved."""

    def saving_is_certain(self) -> bool:
        return bool(self.saved)


class PassedAfterTheFirstBlock(Control):
    def __init__(self) -> None:
        super().__init__(timeout_s=3600.0)

    def remaining_s(self) -> float | None:
        return 0.0 if self.progress.done_bytes > SIZE else 3600.0


BackendT = TypeVar("BackendT", bound=SimulatedBackend)


def filled(backend: BackendT) -> BackendT:
    for tag in ("weights", "weights", "kv_cache"):
        with backend.region(tag) as region:
            region.buffer(SIZE).write(b"x" * SIZE)
    return backend


def test_a_deadline_does_not_stop_what_cannot_be_undone() -> None:
    backend = filled(Certain())
    assert backend.suspend(1, control=PassedAfterTheFirstBlock()).changed
    assert backend.mapped_bytes == 0
    strict = filled(SimulatedBackend())
    with pytest.raises(TransitionTimeoutError) as caught:
        strict.suspend(1, control=PassedAfterTheFirstBlock())
    assert not caught.value.report.changed
    assert strict.mapped_bytes == 3 * SIZE


def test_the_deadline_counts_again_in_the_next_operation() -> None:
    backend = filled(Certain())
    control = PassedAfterTheFirstBlock()
    backend.suspend(1, control=control)
    with pytest.raises(TransitionTimeoutError):
        backend.resume(control=control)
    assert backend.mapped_bytes == 0


def test_a_fault_after_the_drop_says_what_is_where_and_can_be_finished() -> None:
    backend = filled(Certain())
    with FaultInjector(backend, {"save": [1]}), pytest.raises(MechanismError) as caught:
        backend.suspend(1)
    tags = caught.value.report.tags
    assert tags["kv_cache"].after.residencies == {Residency.DISCARDED}
    assert tags["weights"].after.residencies == {Residency.OFFLOADED, Residency.RESIDENT}
    assert len(backend.saved) == 1, "the copy of a block that stayed mapped is dropped"
    backend.suspend(1)
    backend.resume()
    assert all(bytes(data) in (b"x" * SIZE, bytes(SIZE)) for data in backend.mapped.values())
    assert backend.state().tags["weights"].resident_bytes == 2 * SIZE


class Listed(SimulatedBackend):
    """Two devices and a list of steps; restores a block when the next one is mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, str, int]] = []
        self._devices = {"weights": cycle(["a", "a", "b"]), "kv_cache": cycle(["b"])}

    def allocate(self, tag: str, size_bytes: int) -> Block:
        block = super().allocate(tag, size_bytes)
        block.device = next(self._devices[tag])
        return block

    def _listed(self, step: str, blocks: Iterable[Block]) -> Iterator[Block]:
        for block in blocks:
            self.steps.append((step, block.device, block.size_bytes))
            yield block

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        return super().save(list(self._listed("save", blocks)), control)

    def map(self, block: Block) -> None:
        list(self._listed("map", [block]))
        super().map(block)

    def fill(self, block: Block, fill: Fill) -> None:
        list(self._listed("fill", [block]))
        super().fill(block, fill)

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        yield from super().restore(list(self._listed("queue", blocks)), control)


class StopsAtTheLast(SimulatedBackend):
    """Restores as many blocks as it has saved and asks for no more."""

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        taken = iter(blocks)
        for _ in list(self.saved):
            yield from super().restore([next(taken)], control)


def test_devices_take_turns_and_all_is_mapped_while_copies_go_on() -> None:
    backend = Listed()
    for tag, size in (("weights", 1), ("weights", 2), ("weights", 3), ("kv_cache", 4)):
        with backend.region(tag) as region:
            region.buffer(size)
    backend.suspend(1)
    in_turn = [("a", 1), ("b", 3), ("a", 2)]
    assert backend.steps == [("save", *block) for block in in_turn]
    backend.steps.clear()
    backend.resume()
    beside = [(step, *block) for block in in_turn for step in ("map", "queue")]
    assert backend.steps == [*beside, ("map", "b", 4), ("fill", "b", 4)]


def test_what_a_restore_does_not_ask_for_is_mapped_all_the_same() -> None:
    backend = filled(StopsAtTheLast())
    backend.suspend(1)
    backend.resume()
    assert backend.mapped_bytes == 3 * SIZE
    assert sorted(map(bytes, backend.mapped.values())) == [bytes(SIZE), *2 * [b"x" * SIZE]]


class Together(SimulatedBackend):
    """Saves, unmaps, maps and restores all blocks at once."""

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[list[Block]]:  # type: ignore[override] # as any mechanism may
        yield list(super().save(blocks, control))

    def batches(self, blocks: Sequence[Block]) -> list[Sequence[Block]]:
        return [blocks]

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[list[Block]]:  # type: ignore[override] # as any mechanism may
        yield list(super().restore(blocks, control))


class Stuck(Together):
    """Refuses to unmap, or to map, one block of those that it gets at once."""

    stuck: tuple[str, int] = ("", 0)

    def unmap_all(self, blocks: Sequence[Block], done: list[Block]) -> None:
        self._until_stuck("unmap", blocks, done)

    def map_all(self, blocks: Sequence[Block], done: list[Block]) -> None:
        self._until_stuck("map", blocks, done)

    def _until_stuck(self, step: str, blocks: Sequence[Block], done: list[Block]) -> None:
        for number, block in enumerate(blocks):
            if (step, number) == self.stuck:
                self.stuck = ("", 0)
                raise MechanismError("stuck")
            getattr(self, step)(block)
            done.append(block)


def test_blocks_may_be_taken_several_at_once() -> None:
    backend = filled(Together())
    backend.suspend(1)
    assert backend.mapped_bytes == 0
    assert len(backend.saved) == 2
    backend.resume()
    assert sorted(map(bytes, backend.mapped.values())) == [bytes(SIZE), *2 * [b"x" * SIZE]]


@pytest.mark.parametrize("stuck", [0, 1])
def test_what_was_done_to_some_of_several_blocks_is_undone(stuck: int) -> None:
    backend = filled(Stuck())
    before = backend.state()
    backend.stuck = ("unmap", stuck)
    with pytest.raises(MechanismError, match="stuck"):
        backend.suspend(1)
    assert backend.state() == before
    assert not backend.saved
    assert [bytes(data) for data in backend.mapped.values()] == 3 * [b"x" * SIZE]
    backend.suspend(1)
    asleep = backend.state()
    backend.stuck = ("map", stuck)
    with pytest.raises(MechanismError, match="stuck"):
        backend.resume()
    assert backend.state() == asleep
    assert backend.mapped_bytes == 0
    backend.resume()
    assert sorted(map(bytes, backend.mapped.values())) == [bytes(SIZE), *2 * [b"x" * SIZE]]


def test_what_was_dropped_of_several_blocks_is_told() -> None:
    backend = filled(Stuck())
    backend.stuck = ("unmap", 1)
    with pytest.raises(MechanismError) as caught:
        backend.discard({"weights"})
    found = caught.value.report.tags["weights"].after.residencies
    assert found == {Residency.DISCARDED, Residency.RESIDENT}
    assert backend.mapped_bytes == 2 * SIZE


class YieldsTwice(Together):
    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[list[Block]]:  # type: ignore[override] # as any mechanism may
        for some in super().save(blocks, control):
            yield [*some, some[0]]


def test_a_block_among_several_is_not_yielded_twice() -> None:
    backend = filled(YieldsTwice())
    with pytest.raises(MechanismError, match="yielded a block twice"):
        backend.suspend(1)
    assert backend.mapped_bytes == 3 * SIZE
