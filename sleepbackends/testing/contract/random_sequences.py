"""Random sequences of calls and faults against a model, which is the transition table."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from sleepbackends.errors import (
    PolicyConflictError,
    SleepBackendsError,
    UnsupportedOperationError,
)
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.residency import REPEATS, TRANSITIONS, Move, Residency
from sleepbackends.settings import BackendSettings
from sleepbackends.testing.contract.faults import check_failure
from sleepbackends.testing.contract.fixtures import ContractFixtures
from sleepbackends.testing.faults import FaultInjector, steps_of
from sleepbackends.testing.memory import ObservedMemory
from sleepbackends.testing.promises import Promise, proves

TAGS = ("weights", "kv_cache", "lora", "runtime")
POLICIES = Policies({"runtime": TagPolicy(Policy.KEEP, Policy.KEEP)})

_MOVES = {Policy.OFFLOAD: Move.OFFLOAD, Policy.DISCARD: Move.DISCARD}
_UNDO = ("map", "restore", "unmap", "reserve")


def _faults(*steps: str) -> st.SearchStrategy[dict[str, set[int]] | None]:
    """Often one fault at a step of the transition itself, sometimes one while undoing it."""
    first = st.dictionaries(
        st.sampled_from(steps), st.sets(st.integers(0, 3), min_size=1, max_size=2), min_size=1
    )
    both = st.tuples(
        first, st.dictionaries(st.sampled_from(_UNDO), st.sets(st.integers(0, 3)), max_size=1)
    ).map(lambda pair: {**pair[1], **pair[0]})
    return st.one_of(st.none(), first, both)


_SOME_TAGS = st.sets(st.sampled_from(TAGS))


@dataclass(eq=False)
class Modelled:
    """What one block should be."""

    memory: ObservedMemory
    tag: str
    contents: bytes
    residency: Residency = Residency.RESIDENT
    defined: bool = True
    asleep_as: Residency | None = None
    """What a stranded block would be without memory; None for a block that is not stranded."""

    def asked(self, move: Move) -> bool | None:
        """Tell whether the move changes this block; None if it is refused."""
        residency = self.asleep_as or self.residency
        if (move, residency) in REPEATS:
            return self.asleep_as is not None
        return True if (move, residency) in TRANSITIONS else None

    def apply(self, move: Move) -> None:
        """Follow the transition table."""
        residency = self.asleep_as or self.residency
        target = TRANSITIONS.get((move, residency), residency)
        self.asleep_as = None
        if move is Move.VALIDATE:
            self.defined = True
        if target is Residency.DISCARDED:
            self.defined = False
            self.contents = bytes(len(self.contents))
        if move is Move.RESUME and not self.defined:
            target = Residency.UNDEFINED
        self.residency = target

    @property
    def readable(self) -> bool:
        """Whether its bytes are what the model says they are."""
        awake = (Residency.RESIDENT, Residency.UNDEFINED)
        return self.residency in awake and self.asleep_as is None


class SleepMachine(RuleBasedStateMachine):
    """Calls a backend at random, with and without faults, and knows what must come out."""

    suite: ClassVar[ContractFixtures]

    def __init__(self) -> None:
        super().__init__()
        self.backend = self.suite.make_backend(BackendSettings(policies=POLICIES))
        self.blocks: list[Modelled] = []
        self.epochs: dict[str, int] = {}
        self.seed = 0

    def teardown(self) -> None:
        """Wake everything without faults: whatever a policy kept must be there."""
        try:
            self.backend.resume()
            for block in self.blocks:
                block.apply(Move.RESUME)
                Promise.BIT_EXACT.check(
                    block.memory.read() == block.contents,
                    f"bytes a policy keeps were lost: a block of tag {block.tag!r}",
                )
        finally:
            self.backend.close()

    @initialize(
        sizes=st.lists(
            st.tuples(st.sampled_from(TAGS), st.integers(1, 9000)), min_size=2, max_size=6
        )
    )
    def populate(self, sizes: list[tuple[str, int]]) -> None:
        """Begin with something to move: most sequences would otherwise move nothing."""
        for tag, size in sizes:
            self.allocate(tag=tag, size=size)

    def _bytes(self, size: int) -> bytes:
        self.seed += 1
        return random.Random(self.seed).randbytes(size)  # noqa: S311 - test data

    def _of(self, tags: Collection[str]) -> list[Modelled]:
        return [block for block in self.blocks if block.tag in tags]

    @rule(tag=st.sampled_from(TAGS), size=st.integers(1, 9000))
    def allocate(self, tag: str, size: int) -> None:
        """Allocate and fill a block, whatever sleeps."""
        if not self.suite.allocates_asleep and self.backend.state().asleep_bytes:
            return
        memory = self.suite.allocate(self.backend, tag, size)
        block = Modelled(memory, tag, self._bytes(size))
        memory.write(block.contents)
        self.blocks.append(block)
        self.epochs.setdefault(tag, 0)

    @rule(index=st.integers(0, 99))
    def write(self, index: int) -> None:
        """Change bytes of a mapped block, valid or not."""
        if not self.blocks:
            return
        block = self.blocks[index % len(self.blocks)]
        if block.readable:
            block.contents = self._bytes(len(block.contents))
            block.memory.write(block.contents)

    @rule(index=st.integers(0, 99))
    def free(self, index: int) -> None:
        """Free a block in whatever residency it is."""
        if self.blocks:
            self.blocks.pop(index % len(self.blocks)).memory.free()

    @rule(
        level=st.sampled_from([1, 1, 1, 2, 0]),
        faults=_faults("synchronize", "check_room_to_save", "save", "unmap"),
    )
    def suspend(self, level: int, faults: dict[str, set[int]] | None) -> None:
        """Suspend by policy."""
        moves = [
            (block, _MOVES[policy])
            for block in self.blocks
            if (policy := POLICIES.at(block.tag, level)) is not Policy.KEEP
        ]
        keeps = any(move is Move.OFFLOAD and block.asked(move) for block, move in moves)
        unable = keeps and not self.backend.capabilities.supports_offload
        self._transition(lambda: self.backend.suspend(level), moves, faults, unable)

    @rule(
        tags=st.one_of(st.none(), _SOME_TAGS),
        faults=_faults("synchronize", "reserve", "map", "restore", "fill"),
    )
    def resume(self, tags: set[str] | None, faults: dict[str, set[int]] | None) -> None:
        """Resume some tags or all."""
        known = set(self.epochs)
        named = known if tags is None else tags & known
        moves = [(block, Move.RESUME) for block in self._of(named)]
        asleep = (Residency.OFFLOADED, Residency.DISCARDED)
        left = any(block.residency in asleep for block in self._of(known - named))
        some = any(block.asked(Move.RESUME) for block, _ in moves)
        unable = some and left and not self.backend.capabilities.supports_selective_resume
        asked = None if tags is None else named
        self._transition(lambda: self.backend.resume(asked), moves, faults, unable)

    @rule(tags=_SOME_TAGS, faults=_faults("synchronize", "unmap"))
    def discard(self, tags: set[str], faults: dict[str, set[int]] | None) -> None:
        """Discard some tags."""
        named = tags & set(self.epochs)
        moves = [(block, Move.DISCARD) for block in self._of(named)]
        unable = not self.backend.capabilities.supports_selective_release or "runtime" in named
        self._transition(lambda: self.backend.discard(named), moves, faults, unable)

    @rule(tags=_SOME_TAGS)
    def mark_valid(self, tags: set[str]) -> None:
        """Declare some tags refilled."""
        named = tags & set(self.epochs)
        moves = [(block, Move.VALIDATE) for block in self._of(named)]
        self._transition(lambda: self.backend.mark_valid(named), moves, None, False)

    def _transition(
        self,
        call: Callable[[], Any],
        moves: list[tuple[Modelled, Move]],
        faults: dict[str, set[int]] | None,
        unable: bool,
    ) -> None:
        refused = unable or any(block.asked(move) is None for block, move in moves)
        # Without steps that are known, nothing can be made to fail.
        injector = FaultInjector(self.backend, faults or {}) if self.suite.has_steps else None
        before = self.backend.state()
        try:
            with injector or nullcontext():
                report = call()
        except (PolicyConflictError, UnsupportedOperationError) as error:
            Promise.FLAGS.check(refused, f"refused although the table allows it: {error}")
            Promise.CHECKED_FIRST.check(
                self.backend.state() == before, "a refused call changed something"
            )
        except SleepBackendsError as error:
            if injector is None:
                raise
            check_failure(error, injector, self.backend)
            self._reconcile(moves)
        else:
            Promise.CHECKED_FIRST.check(not refused, "the table does not allow this")
            if injector and injector.fired:  # a call without a fault is no trial of it
                Promise.FAULTS_SHOW.check(False, "a fault was swallowed")
            asked = [(block, move) for block, move in moves if block.asked(move)]
            if report is not None:
                Promise.REPEATING.check(
                    report.changed == bool(asked),
                    f"{len(asked)} blocks were to move, the report says changed={report.changed}",
                )
            self._count_epochs(block.tag for block, move in asked if move is Move.DISCARD)
            for block, move in asked:
                block.apply(move)

    def _reconcile(self, moves: list[tuple[Modelled, Move]]) -> None:
        """After a fault each block is where it was, or where it was going; never elsewhere."""
        dropped = []
        ledger = steps_of(self.backend).ledger
        for block, move in moves:
            placement = ledger.get(block.memory.address).placement
            was_stranded = block.asleep_as is not None
            if placement.stranded == was_stranded and placement.residency is block.residency:
                continue
            if move is Move.OFFLOAD:
                Promise.ALL_OR_REPORTED.check(
                    placement.owed, "a block to be kept is neither here nor saved"
                )
            elif move is Move.DISCARD:
                Promise.ALL_OR_REPORTED.check(
                    placement.residency is Residency.DISCARDED,
                    f"a block to be dropped is {placement.residency.value}",
                )
                dropped.append(block.tag)
            else:
                Promise.NEVER_HALF_AWAKE.check(
                    placement.stranded, "a failed resume left a block awake"
                )
            if placement.stranded:
                block.asleep_as = placement.asleep().residency
                block.residency = Residency.UNDEFINED
            else:
                block.apply(move)
        self._count_epochs(dropped)

    def _count_epochs(self, tags: Any) -> None:
        for tag in set(tags):
            self.epochs[tag] += 1

    @invariant()
    def state_tells_the_truth(self) -> None:
        """Bytes by residency, epochs, and the bytes themselves are what the model says."""
        state = self.backend.state()
        known = set(self.epochs)
        Promise.DERIVED_STATE.check(set(state.tags) == known, f"tags {known} are used: {state}")
        for tag, epoch in self.epochs.items():
            blocks = self._of([tag])
            found = state.tags[tag]
            Promise.EPOCHS.check(
                found.epoch == epoch, f"{tag} lost contents {epoch} times: {found}"
            )
            Promise.DERIVED_STATE.check(
                found.blocks == len(blocks), f"{tag} has {len(blocks)} blocks: {found}"
            )
            for residency in Residency:
                size = sum(len(b.contents) for b in blocks if b.residency is residency)
                Promise.DERIVED_STATE.check(
                    found.bytes_in(residency) == size,
                    f"{tag} has {size} bytes that are {residency.value}: {found}",
                )
        for block in self.blocks:
            if block.readable:
                Promise.BIT_EXACT.check(
                    block.memory.read() == block.contents,
                    f"bytes differ from what was kept: a block of tag {block.tag!r}",
                )


class RandomSequenceTests(ContractFixtures):
    """No sequence of calls and faults loses bytes a policy keeps or makes the state lie."""

    random_settings: ClassVar[settings] = settings(
        max_examples=200,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    """How many sequences are tried, and how."""

    @proves(Promise.BIT_EXACT)
    def test_random_sequences(self) -> None:
        """Run the machine."""
        self.assume("one_block_each", "frees_at_once")

        class Machine(SleepMachine):
            suite = self

        run_state_machine_as_test(Machine, settings=self.random_settings)
