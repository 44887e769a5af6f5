"""Ranks in one process: one orchestrator drives them like one backend."""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from sleepbackends import (
    BackendState,
    BusyError,
    Capabilities,
    ClosedError,
    Control,
    DeviceMemoryError,
    HookError,
    MechanismError,
    Orchestrator,
    Policies,
    Policy,
    PolicyConflictError,
    ReleaseStrategy,
    RequestError,
    SuspendReport,
    TagPolicy,
    TransitionCancelledError,
    TransitionTimeoutError,
    UnknownTagError,
    UnsupportedOperationError,
)
from sleepbackends.composite import CompositeBackend
from sleepbackends.control import Stage
from sleepbackends.ranks import Command, InProcessGroup, Rank, RankGroup
from sleepbackends.ranks.merging import merged_states
from sleepbackends.ranks.messages import Request, Step
from sleepbackends.testing import FakeEngine, SimulatedBackend, SimulatedOptions
from sleepbackends.testing.simulated import ALL
from tests.gated import Gate, GatedBackend
from tests.ranks.parts import SIZE, TAGS, Parts, alike, check_fault, each_fault, simulated

COUNT = 3


def grouped(parts: list[Parts], **limits: float) -> InProcessGroup:
    return InProcessGroup([part.backend for part in parts], **limits)


def engine(group: InProcessGroup) -> tuple[Orchestrator, FakeEngine]:
    engine = FakeEngine()
    return Orchestrator(group, hooks=engine.hooks()), engine


def gated(count: int = 2) -> tuple[InProcessGroup, list[Parts]]:
    parts = [Parts(GatedBackend(), rank) for rank in range(count)]
    return grouped(parts, timeout_s=30.0, grace_s=5.0), parts


def test_ranks_sleep_release_and_wake_as_one() -> None:
    parts = simulated(COUNT)
    orchestrator, hooks = engine(grouped(parts))
    report = orchestrator.sleep()
    assert report.released_bytes == 6 * SIZE * COUNT
    assert all(part.backend.mapped_bytes == 0 for part in parts)
    assert orchestrator.wake_up().serving
    assert all(part.holds("weights") and part.holds("lora") for part in parts)
    released = orchestrator.release_kv_cache()
    assert released.strategy is ReleaseStrategy.SELECTIVE
    assert released.released_bytes == 2 * SIZE * COUNT
    assert orchestrator.state().sleep_state.value == "kv_cache_released"
    assert orchestrator.wake_up().serving
    assert not orchestrator.wake_up().changed
    assert hooks.named() == ["quiesce", "drop_caches", "unquiesce"] * 2


def test_plans_states_and_reports_are_sums_and_kept_by_rank() -> None:
    parts = simulated(COUNT)
    with parts[1].backend.region("kv_cache") as region:
        region.buffer(SIZE)
    orchestrator, _ = engine(grouped(parts))
    numbers = set(range(COUNT))
    for plan in (orchestrator.plan_sleep(), orchestrator.plan_wake(), orchestrator.plan_release()):
        assert plan.ranks.keys() == numbers
        assert plan.size_bytes == sum(one.size_bytes for one in plan.ranks.values())
        assert plan.host_bytes_needed == sum(p.host_bytes_needed for p in plan.ranks.values())
    assert orchestrator.plan_sleep().ranks[1].tags["kv_cache"].size_bytes == 3 * SIZE
    (step,) = orchestrator.sleep().steps
    assert isinstance(step, SuspendReport)
    assert (step.backend, step.level) == ("ranks", 1)
    assert step.ranks.keys() == numbers
    assert step.copied_bytes == 4 * SIZE * COUNT
    assert step.released_bytes == sum(one.released_bytes for one in step.ranks.values())
    assert step.ranks[1].tags["kv_cache"].released_bytes == 3 * SIZE
    assert step.tags["weights"].policy is Policy.OFFLOAD
    assert step.phases["save"] == max(one.phases["save"] for one in step.ranks.values())
    state = orchestrator.state().memory
    assert state.tags["kv_cache"].epoch == COUNT
    assert state.ranks[2] == parts[2].backend.state()


def test_progress_counts_the_bytes_of_all_ranks() -> None:
    orchestrator, _ = engine(grouped(simulated(COUNT)))
    seen: list[Any] = []
    orchestrator.sleep(on_progress=seen.append)
    assert seen[-1].done_bytes == seen[-1].total_bytes == 4 * SIZE * COUNT


def test_a_group_can_do_what_all_of_its_ranks_can() -> None:
    weak = replace(ALL, supports_selective_release=False, supports_staging=True)
    backends = [
        SimulatedBackend(SimulatedOptions(flags))
        for flags in (ALL, weak, replace(ALL, preserves_communicators=False))
    ]
    parts = [Parts(backend, rank) for rank, backend in enumerate(backends)]
    group = grouped(parts)
    expected = replace(ALL, supports_selective_release=False, preserves_communicators=False)
    assert group.capabilities == expected
    orchestrator, hooks = engine(group)
    report = orchestrator.release_kv_cache()
    assert report.strategy is ReleaseStrategy.SUSPEND_AND_RELOAD
    assert alike(group.state())
    assert group.state().asleep_tags() == {"kv_cache"}
    assert "teardown_communicators" in hooks.named()
    with pytest.raises(UnsupportedOperationError, match=r"rank 1: .*supports_selective_release"):
        group.discard(["lora"])
    assert group.state().asleep_tags() == {"kv_cache"}


def test_a_device_context_that_one_rank_gives_back_is_gone_for_hooks_of_all() -> None:
    parts = simulated(2)
    deep = SimulatedBackend(SimulatedOptions(replace(ALL, releases_device_context=True)))
    orchestrator, hooks = engine(InProcessGroup([parts[0].backend, Parts(deep, 1).backend]))
    assert orchestrator.capabilities.releases_device_context
    orchestrator.sleep()
    assert hooks.named() == ["quiesce"], "caches cannot be dropped before the context is back"
    assert orchestrator.wake_up().serving
    assert hooks.named()[0] == "drop_caches"
    for contexts, expected in [
        ((None, None), None),
        ((False, False), False),
        ((None, True), True),
        ((False, None), None),
    ]:
        states = {n: BackendState(context_released=gone) for n, gone in enumerate(contexts)}
        assert merged_states(states).context_released is expected


def test_a_composite_moves_as_a_whole_and_is_brought_back() -> None:
    class Outer(SimulatedBackend):
        name = "outer"

    class Whole(SimulatedBackend):
        name = "whole"

    whole = replace(ALL, owns_allocations=False, releases_device_context=True)
    inner = Whole(SimulatedOptions(whole))
    with inner.region("process") as region:
        region.buffer(SIZE)
    outer, plain = Parts(Outer(), 0), Parts(SimulatedBackend(), 1)
    group = InProcessGroup([CompositeBackend(outer.backend, inner), plain.backend])
    plain.break_at({"save": [0]})
    with pytest.raises(MechanismError, match="rank 1: suspend failed"):
        group.suspend(1)
    plain.break_at({})
    assert not group.state().asleep_tags(), "both of its parts are awake again"
    assert group.suspend(1).changed
    assert group.state().mapped_bytes == 0
    group.resume()
    assert outer.holds("weights")
    assert not group.state().asleep_tags()


def test_ranks_may_have_different_tags() -> None:
    parts = simulated(2)
    with parts[1].backend.region("experts") as region:
        region.buffer(SIZE)
    group = grouped(parts)
    orchestrator, _ = engine(group)
    orchestrator.sleep()
    orchestrator.wake_up(["experts", "weights"])
    assert group.state().asleep_tags() == {"kv_cache", "lora"}
    assert alike(group.state()) is False, "only one rank has that tag at all"
    assert group.differences() == []
    orchestrator.wake_up()
    assert orchestrator.release(["experts"]).released_bytes == SIZE
    orchestrator.wake_up()
    group.mark_valid(["experts"])
    with pytest.raises(UnknownTagError, match="known tags: 'experts', 'kv_cache'"):
        group.resume(["no_such"])
    with pytest.raises(RequestError, match="collection of strings"):
        group.discard("weights")


@pytest.mark.parametrize(("verb", "step", "call"), list(each_fault()))
def test_a_fault_on_one_rank_at_every_step(verb: str, step: str, call: int) -> None:
    parts = simulated(2)
    group = grouped(parts)
    check_fault(group, verb, step, call, parts[1].break_at)
    assert all(part.holds("weights") and part.holds("lora") for part in parts)


def test_a_suspend_that_fails_while_it_drops_is_brought_back_on_all_ranks() -> None:
    parts = simulated(COUNT)
    orchestrator, hooks = engine(grouped(parts))
    parts[1].break_at({"unmap": [5]})
    with pytest.raises(Exception, match="ranks differ now: 'kv_cache' is undefined on") as caught:
        orchestrator.sleep()
    report = caught.value.report  # type: ignore[attr-defined]
    assert report.dropped_tags == {"kv_cache"}
    parts[1].break_at({})
    assert orchestrator.state().serving, "everything is back, and the KV cache expendable"
    assert hooks.named() == ["quiesce", "drop_caches", "unquiesce"]
    assert all(part.holds("weights") and part.holds("lora") for part in parts)


def test_no_room_on_one_rank_leaves_all_asleep() -> None:
    parts = simulated(COUNT)
    orchestrator, _ = engine(grouped(parts))
    orchestrator.sleep()
    parts[2].backend.device.budget_bytes = 5 * SIZE
    with pytest.raises(DeviceMemoryError, match="rank 2: ") as caught:
        orchestrator.wake_up()
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (6 * SIZE, 5 * SIZE)
    assert not caught.value.report.changed
    assert all(part.backend.mapped_bytes == 0 for part in parts)
    parts[2].backend.device.budget_bytes = 6 * SIZE
    assert orchestrator.wake_up().serving


def test_failures_of_several_ranks_are_told() -> None:
    parts = simulated(COUNT)
    group = grouped(parts)
    group.backends[0].suspend(2)
    parts[0].break_at({"check_room_to_save": [0]})
    parts[2].break_at({"check_room_to_save": [0]})
    with pytest.raises(PolicyConflictError, match="rank 0: tag 'weights'"):
        group.suspend(1)
    group.backends[0].resume()
    parts[0].break_at({"synchronize": [0]})
    with pytest.raises(Exception, match=r"rank \d: suspend failed") as caught:
        group.suspend(1)
    told = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "check_room_to_save" in told or "synchronize" in told


def test_nothing_changes_anywhere_before_all_have_checked() -> None:
    order: list[str] = []

    class Slow(GatedBackend):
        def check_room_to_save(self, blocks: Any) -> None:
            time.sleep(0.2)
            order.append("checked")

    class Fast(GatedBackend):
        def save(self, blocks: Any, control: Control) -> Any:
            order.append("saves")
            return super().save(blocks, control)

    group = InProcessGroup([Parts(Fast(), 0).backend, Parts(Slow(), 1).backend])
    group.suspend(1)
    assert order == ["checked", "saves"]


def test_nothing_is_dropped_before_all_have_saved() -> None:
    group, parts = gated()
    gate = parts[1].backend.saving = Gate()
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(group.suspend, 1)
        assert gate.reached.wait(10)
        time.sleep(0.1)
        assert parts[0].backend.state().tags["weights"].offloaded_bytes == 2 * SIZE
        assert parts[0].backend.state().tags["kv_cache"].resident_bytes == 2 * SIZE
        gate.open.set()
        assert going.result(10).changed


def test_a_rank_that_hangs_is_named_at_the_deadline_and_goes_on_harmlessly() -> None:
    group, parts = gated(3)
    group = InProcessGroup([p.backend for p in parts], timeout_s=30.0, grace_s=0.2)
    gate = parts[1].backend.saving = Gate()
    started = time.monotonic()
    with pytest.raises(TransitionTimeoutError, match="rank 1 did not say how it ended") as caught:
        group.suspend(1, control=Control(timeout_s=1.0))
    assert time.monotonic() - started < 15
    assert {n for n, one in caught.value.report.ranks.items() if one.changed} == {1}
    for number in (0, 2):
        assert not parts[number].backend.state().asleep_tags()
    gate.open.set()
    for _ in range(100):
        if not parts[1].backend.state().asleep_tags():
            break
        time.sleep(0.05)
    assert not group.state().asleep_tags(), "it has undone what it did"
    parts[1].backend.saving = None
    assert group.suspend(1).changed
    assert group.resume().changed


def test_a_cancelled_transition_is_undone_on_all_ranks() -> None:
    group, parts = gated()
    gate, control = Gate(), Control()
    parts[1].backend.saving = gate
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(group.suspend, 1, control=control)
        assert gate.reached.wait(10)
        control.cancel()
        time.sleep(0.05)
        gate.open.set()
        error = going.exception(10)
    assert isinstance(error, TransitionCancelledError)
    assert not error.report.changed
    assert not group.state().asleep_tags()
    assert all(part.holds(tag) for part in parts for tag in TAGS)


def test_one_transition_at_a_time() -> None:
    group, parts = gated()
    gate = parts[0].backend.saving = Gate()
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(group.suspend, 1)
        assert gate.reached.wait(10)
        with pytest.raises(BusyError, match="suspend by thread"):
            group.resume(control=Control(timeout_s=0.05))
        gate.open.set()
        going.result(10)


def test_a_rank_whose_own_lock_is_held_keeps_all_waiting() -> None:
    group, parts = gated()
    gate = parts[0].backend.saving = Gate()
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(parts[0].backend.suspend, 1)
        assert gate.reached.wait(10)
        with pytest.raises(BusyError, match="rank 0: suspend waited"):
            group.suspend(1, control=Control(timeout_s=0.2))
        assert not parts[1].backend.state().asleep_tags()
        gate.open.set()
        going.result(10)
    parts[0].backend.saving = None
    assert group.differences(), "one rank moved by itself"
    group.suspend(1)
    assert not group.differences()


def test_ranks_refuse_what_belongs_to_an_earlier_transition() -> None:
    rank = Rank(simulated(1)[0].backend)
    suspend = Request("suspend")
    first = rank.answer(Command(Step.BEGIN, 3, suspend, 30.0))
    assert (first.stage, first.epoch, first.total_bytes) == (Stage.CHECKED, 3, 4 * SIZE)
    for step in (Step.PROCEED, Step.ABORT):
        error = rank.answer(Command(step, 2)).error
        assert isinstance(error, RequestError)
        assert "transition 2 came to a rank that is at transition 3" in error.message
    assert isinstance(rank.answer(Command(Step.BEGIN, 3, suspend, 30.0)).error, RequestError)
    second = rank.answer(Command(Step.BEGIN, 4, suspend, 30.0))
    assert (second.stage, second.epoch) == (Stage.CHECKED, 4), "the first was given up"
    assert rank.answer(Command(Step.PROCEED, 4)).stage is Stage.UNDOABLE
    ended = rank.answer(Command(Step.PROCEED, 4))
    assert ended.stage is None
    assert ended.report is not None
    assert rank.answer(Command(Step.ABORT, 4)) == ended, "it had ended"


def test_a_new_coordinator_goes_on_counting() -> None:
    backend = simulated(1)[0].backend
    rank = Rank(backend)
    RankGroup({0: rank}).suspend(1)
    assert RankGroup({0: rank}).resume().changed


def test_a_rank_that_hears_nothing_more_undoes_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sleepbackends.ranks.participant.SLACK_S", 0.0)
    part = simulated(1)[0]
    rank = Rank(part.backend)
    rank.answer(Command(Step.BEGIN, 1, Request("suspend"), 0.2))
    assert rank.answer(Command(Step.PROCEED, 1)).stage is Stage.UNDOABLE
    assert part.backend.state().tags["weights"].offloaded_bytes
    for _ in range(100):
        if not part.backend.state().asleep_tags():
            break
        time.sleep(0.02)
    assert part.holds("weights")
    late = rank.answer(Command(Step.PROCEED, 1))
    assert isinstance(late.error, TransitionTimeoutError)


def test_an_error_that_cannot_be_sent_says_the_same_in_another_class() -> None:
    part = simulated(1)[0]

    def broken(*_: object) -> None:
        error = MechanismError("the driver says no")
        error.tags = threading.Lock()  # type: ignore[assignment]
        raise error

    part.backend.synchronize = broken
    rank = Rank(part.backend)
    error = rank.answer(Command(Step.BEGIN, 1, Request("suspend"), 30.0)).error
    assert error is not None
    assert error.message == "MechanismError: the driver says no"
    assert pickle.loads(pickle.dumps(error)).message == error.message
    group = grouped([part])
    with pytest.raises(MechanismError, match="rank 0: the driver says no"):
        group.suspend(1)


class OnlyTheProtocol:
    """A backend that is no ``BaseBackend``: it stops nowhere by itself."""

    api_version = 1

    def __init__(self, backend: SimulatedBackend) -> None:
        self._backend = backend
        self.capabilities: Capabilities = backend.capabilities

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@pytest.mark.parametrize("plain", [0, 1])
def test_a_backend_that_only_meets_the_protocol_is_undone_from_outside(plain: int) -> None:
    parts = simulated(2)
    other = parts[1 - plain]
    backends = [part.backend for part in parts]
    backends[plain] = OnlyTheProtocol(backends[plain])
    group = InProcessGroup(backends, timeout_s=20.0)
    other.break_at({"save": [0]})
    with pytest.raises(Exception, match=f"rank {1 - plain}: suspend failed"):
        group.suspend(1)
    other.break_at({})
    assert not group.state().asleep_tags()
    group.mark_valid(["kv_cache"])
    group.suspend(1)
    other.break_at({"restore": [0]})
    with pytest.raises(Exception, match=f"rank {1 - plain}: resume failed"):
        group.resume()
    other.break_at({})
    assert alike(group.state())
    assert group.state().mapped_bytes == 0
    with pytest.raises(PolicyConflictError, match="are asleep and cannot be declared valid"):
        group.mark_valid(["kv_cache"])
    group.resume()
    group.mark_valid(["kv_cache"])
    assert not group.state().unusable_tags()
    assert all(part.holds("weights") and part.holds("lora") for part in parts)
    group.backends[1 - plain].suspend(2)
    with pytest.raises(PolicyConflictError):
        group.suspend(1)


def test_policies_of_one_call_reach_all_ranks() -> None:
    group = grouped(simulated(2))
    group.suspend(1, policies=Policies({"lora": TagPolicy(Policy.KEEP, Policy.KEEP)}))
    assert group.state().asleep_tags() == {"weights", "kv_cache"}


def test_a_hook_that_raises_leaves_all_ranks_asleep() -> None:
    group = grouped(simulated(2))
    orchestrator, hooks = engine(group)
    hooks.fail["drop_caches"] = RuntimeError("no")
    with pytest.raises(HookError):
        orchestrator.sleep()
    assert group.state().mapped_bytes == 0
    hooks.fail.clear()
    assert orchestrator.wake_up().serving


def test_closing_closes_every_rank_and_refuses_what_follows() -> None:
    parts = simulated(2)
    group = grouped(parts)
    group.close()
    group.close()
    for backend in (group, *group.backends):
        with pytest.raises(ClosedError):
            backend.suspend(1)


def test_a_group_needs_a_rank() -> None:
    with pytest.raises(RequestError, match="needs a rank"):
        InProcessGroup([])


def test_no_thread_is_left_behind() -> None:
    before = set(threading.enumerate())
    group = grouped(simulated(COUNT))
    group.suspend(1)
    group.resume()
    for _ in range(100):
        left = set(threading.enumerate()) - before
        if not left:
            break
        time.sleep(0.02)
    assert not left
