"""Random calls to a group with faults on any rank: all move or none, or the error says so."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from sleepbackends import SleepBackendsError
from sleepbackends.ranks import InProcessGroup
from sleepbackends.testing.faults import STEPS
from tests.ranks.parts import TAGS, residencies, simulated

FAULT = st.tuples(
    st.integers(0, 2), st.sampled_from([*STEPS, *["unmap"] * 8]), st.sampled_from([0, 1, 2, 4, 5])
)
MAPPED = {"resident": "mapped", "undefined": "mapped"}


class GroupMachine(RuleBasedStateMachine):
    """Three ranks; what one call is told must be what is so."""

    named: set[str]

    @initialize()
    def start(self) -> None:
        self.parts = simulated(3)
        self.group = InProcessGroup([part.backend for part in self.parts], timeout_s=20.0)
        self.differs: set[str] = set()
        self.lost = [set[str]() for _ in self.parts]

    def call(self, asked: set[str], verb: str, *arguments: Any) -> None:
        before, state = residencies(self.group.state()), self.group.state()
        error = None
        try:
            getattr(self.group, verb)(*arguments)
        except SleepBackendsError as raised:
            error = raised
        after, now = residencies(self.group.state()), self.group.state()
        self.differs = {t for t in TAGS if len({tags[t] for tags in after.values()}) > 1}
        for number, rank in now.ranks.items():
            for tag in TAGS:
                if rank.tags[tag].epoch > state.ranks[number].tags[tag].epoch:
                    self.lost[number].add(tag)
        if error is None:
            for tag in asked:
                places = {frozenset(MAPPED.get(r, r) for r in tags[tag]) for tags in after.values()}
                assert len(places) == 1, f"{verb} went well, and {tag} differs: {after}"
            return
        if error.report is None or not error.report.changed:
            assert after == before, f"changed, and says it did not: {error}"
        for tag in self.differs:
            if after != before:
                assert f"{tag!r} is " in str(error), f"{tag} differs, and is not named: {error}"
                self.named.add(verb)

    @rule(
        verb=st.sampled_from(["suspend", "resume", "discard"]),
        level=st.integers(1, 2),
        tags=st.sets(st.sampled_from(TAGS), min_size=1),
        everything=st.booleans(),
        fault=st.one_of(st.none(), FAULT),
    )
    def transition(
        self,
        verb: str,
        level: int,
        tags: set[str],
        everything: bool,
        fault: tuple[int, str, int] | None,
    ) -> None:
        if fault is not None:
            self.parts[fault[0]].break_at({fault[1]: [fault[2]]})
        if verb == "suspend":
            self.call(set(TAGS), "suspend", level)
        elif verb == "discard":
            self.call(tags, "discard", tags)
        elif everything:
            self.call(set(TAGS), "resume")
        else:
            self.call(tags, "resume", tags)
        for part in self.parts:
            part.break_at({})

    @rule(tag=st.sampled_from(TAGS))
    def refill(self, tag: str) -> None:
        if all(rank.tags[tag].asleep_bytes == 0 for rank in self.group.state().ranks.values()):
            for number, part in enumerate(self.parts):
                part.fill(tag)
                self.lost[number].discard(tag)
            self.group.mark_valid([tag])

    @invariant()
    def no_bytes_are_lost_but_those_that_were_dropped(self) -> None:
        state = self.group.state()
        for number, part in enumerate(self.parts):
            for tag in TAGS:
                if state.ranks[number].tags[tag].usable and tag not in self.lost[number]:
                    assert part.holds(tag), f"rank {number} lost {tag}"

    @invariant()
    def sums_are_sums(self) -> None:
        state = self.group.state()
        for tag in TAGS:
            for field in ("total_bytes", "mapped_bytes", "epoch", "blocks"):
                each = [getattr(rank.tags[tag], field) for rank in state.ranks.values()]
                assert getattr(state.tags[tag], field) == sum(each)

    def teardown(self) -> None:
        """There is always a way back to all ranks being alike."""
        if hasattr(self, "group"):
            self.group.resume()
            self.group.mark_valid(TAGS)
            assert not self.group.state().unusable_tags()
            self.group.close()


def test_random_transitions_with_faults() -> None:
    named: set[str] = set()
    run_state_machine_as_test(
        type("Machine", (GroupMachine,), {"named": named}),
        settings=settings(
            max_examples=200,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert named == {"suspend", "discard"}, "the test never came to a difference"
