"""The orchestrator's verbs on a backend that can do everything."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from sleepbackends import (
    BusyError,
    ClosedError,
    InvalidLevelError,
    Orchestrator,
    Policies,
    Policy,
    PolicyConflictError,
    ReleaseStrategy,
    RequestError,
    Residency,
    SleepConfig,
    Status,
    SuspendedError,
    TagPolicy,
    UnknownTagError,
)
from sleepbackends.testing import FakeEngine, SimulatedBackend

SIZE = 1000


def make(*without: str, **config: Any) -> tuple[Orchestrator, FakeEngine, dict[str, Any]]:
    """An orchestrator over simulated memory with weights, kv_cache and lora."""
    engine = FakeEngine()
    sleep_config = SleepConfig(**config)
    backend = SimulatedBackend(None, sleep_config.settings)
    memory = {}
    for tag in ("weights", "kv_cache", "lora"):
        with backend.region(tag) as region:
            memory[tag] = region.buffer(SIZE)
        memory[tag].write(tag[:1].encode() * SIZE)
    orchestrator = Orchestrator(backend, config=sleep_config, hooks=engine.hooks(*without))
    return orchestrator, engine, memory


def test_sleep_level_1_and_wake() -> None:
    orchestrator, engine, memory = make()
    assert orchestrator.state().status is Status.AWAKE
    plan = orchestrator.plan_sleep(1)
    assert plan.changes
    assert plan.size_bytes == 3 * SIZE
    assert plan.host_bytes_needed == 2 * SIZE
    report = orchestrator.sleep(1)
    assert report.changed
    assert not report.serving
    assert not report.degraded
    assert report.released_bytes == 3 * SIZE
    assert engine.calls == [("quiesce", "wait"), ("drop_caches", frozenset({"kv_cache"}))]
    engine.calls.clear()
    assert orchestrator.state().status is Status.ASLEEP
    assert orchestrator.plan_wake().reload_tags == frozenset()
    report = orchestrator.wake_up()
    assert report.serving
    assert report.released_bytes == -3 * SIZE
    assert engine.named() == ["unquiesce"]
    assert orchestrator.state().status is Status.AWAKE
    assert memory["weights"].read() == b"w" * SIZE
    assert memory["lora"].read() == b"l" * SIZE
    assert memory["kv_cache"].read() == bytes(SIZE)


def test_sleep_level_2_reloads_through_the_hook() -> None:
    orchestrator, engine, memory = make()
    orchestrator.sleep(2)
    assert orchestrator.plan_wake().reload_tags == {"weights"}
    engine.calls.clear()
    report = orchestrator.wake_up()
    assert report.serving
    assert report.undefined_tags == frozenset()
    assert engine.calls == [("reload", frozenset({"weights"})), ("unquiesce",)]
    assert memory["lora"].read() == b"l" * SIZE, "a tag nobody declared is never dropped"


def test_sleep_level_2_without_a_reload_hook_waits_for_mark_valid() -> None:
    orchestrator, engine, memory = make("reload")
    orchestrator.sleep(2)
    report = orchestrator.wake_up()
    assert not report.serving
    assert report.undefined_tags == {"weights"}
    assert "unquiesce" not in engine.named()
    with pytest.raises(SuspendedError), orchestrator.use():
        raise AssertionError("admitted with undefined weights")
    memory["weights"].write(b"n" * SIZE)
    report = orchestrator.mark_valid(["weights"])
    assert report.serving
    assert engine.named() == ["unquiesce"]


def test_level_0_pauses_only() -> None:
    orchestrator, engine, _ = make()
    assert orchestrator.sleep(0, mode="keep").changed
    assert engine.calls == [("quiesce", "keep")]
    assert orchestrator.state().status is Status.PAUSED
    assert not orchestrator.sleep(0).changed
    assert orchestrator.wake_up().changed
    assert orchestrator.state().serving


def test_release_kv_cache_is_selective() -> None:
    orchestrator, engine, memory = make()
    plan = orchestrator.plan_release()
    assert plan.strategy is ReleaseStrategy.SELECTIVE
    report = orchestrator.release_kv_cache()
    assert report.strategy is ReleaseStrategy.SELECTIVE
    assert not report.degraded
    assert report.tags["kv_cache"].released_bytes == SIZE
    assert report.released_bytes == SIZE
    assert engine.calls[-1] == ("drop_caches", frozenset({"kv_cache"}))
    assert orchestrator.state().status is Status.PARTIAL
    with orchestrator.use({"weights"}):
        assert memory["weights"].read() == b"w" * SIZE
    with pytest.raises(SuspendedError), orchestrator.use({"kv_cache"}):
        raise AssertionError("admitted to released memory")
    again = orchestrator.release_kv_cache()
    assert not again.changed
    assert not orchestrator.plan_release().changes
    assert orchestrator.wake_up(["kv_cache"]).serving
    assert orchestrator.state().memory.tags["kv_cache"].epoch == 1


def test_a_tag_that_matters_has_to_be_reloaded_after_a_release() -> None:
    orchestrator, engine, _ = make()
    orchestrator.release({"lora"})
    engine.calls.clear()
    orchestrator.wake_up()
    assert ("reload", frozenset({"lora"})) in engine.calls


def test_waking_by_parts_in_either_order() -> None:
    for order in (["weights", "kv_cache", "lora"], ["kv_cache", "lora", "weights"]):
        orchestrator, engine, memory = make()
        orchestrator.sleep(1)
        for tag in order[:-1]:
            report = orchestrator.wake_up([tag])
            assert report.changed
            assert not report.serving
        assert "unquiesce" not in engine.named()
        assert not orchestrator.wake_up([order[0]]).changed
        assert orchestrator.wake_up(order).serving
        assert memory["weights"].read() == b"w" * SIZE


def test_no_ops_say_so() -> None:
    orchestrator, engine, _ = make()
    assert not orchestrator.wake_up().changed
    assert engine.named() == []
    orchestrator.sleep(1)
    engine.calls.clear()
    assert not orchestrator.sleep(1).changed
    assert not orchestrator.wake_up([]).changed
    assert engine.named() == []
    assert orchestrator.state().status is Status.ASLEEP


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda o: o.sleep(3), InvalidLevelError),
        (lambda o: o.wake_up(["typo"]), UnknownTagError),
        (lambda o: o.wake_up("weights"), RequestError),
        (lambda o: o.release(["weights", "typo"]), UnknownTagError),
        (lambda o: o.release(["kept"]), PolicyConflictError),
        (lambda o: o.mark_valid(["typo"]), UnknownTagError),
        (lambda o: o.plan_sleep(-1), InvalidLevelError),
        (lambda o: o.plan_release(["typo"]), UnknownTagError),
        (lambda o: o.plan_wake(["typo"]), UnknownTagError),
    ],
)
def test_bad_requests_change_nothing(call: Any, error: type[Exception]) -> None:
    orchestrator, engine, _ = make(policies={"kept": "keep"})
    with orchestrator.backend.region("kept") as region:  # type: ignore[attr-defined]
        region.buffer(SIZE)
    before = orchestrator.state()
    with pytest.raises(error):
        call(orchestrator)
    assert orchestrator.state() == before
    assert engine.named() == []


def test_a_different_policy_on_sleeping_memory_is_refused() -> None:
    orchestrator, _, memory = make()
    orchestrator.sleep(1)
    with pytest.raises(PolicyConflictError, match="weights"):
        orchestrator.sleep(2)
    with pytest.raises(PolicyConflictError, match="weights"):
        orchestrator.release(["weights"])
    assert orchestrator.state().memory.tags["weights"].residencies == {Residency.OFFLOADED}
    orchestrator.wake_up()
    assert memory["weights"].read() == b"w" * SIZE


def test_work_is_finished_before_memory_goes() -> None:
    orchestrator, _, memory = make()
    inside, leave = threading.Event(), threading.Event()

    def work() -> bytes:
        with orchestrator.use(holder="request 7"):
            inside.set()
            assert leave.wait(60)
            return bytes(memory["weights"].read())

    with ThreadPoolExecutor(2) as pool:
        working = pool.submit(work)
        assert inside.wait(60)
        with pytest.raises(BusyError, match="request 7") as caught:
            orchestrator.sleep(1, timeout_s=0.05)
        assert caught.value.holders == ("request 7",)
        assert orchestrator.state().status is Status.AWAKE, "refused, so it serves on"
        sleeping = pool.submit(orchestrator.sleep, 1)
        leave.set()
        assert working.result(60) == b"w" * SIZE
        assert sleeping.result(60).changed
    with pytest.raises(SuspendedError), orchestrator.use():
        raise AssertionError("admitted while asleep")


def test_a_transition_inside_ones_own_work_is_refused() -> None:
    orchestrator, _, _ = make()
    with orchestrator.use(), pytest.raises(BusyError, match="this very thread"):
        orchestrator.sleep(1)
    assert orchestrator.state().serving


def test_threads_share_the_outcome() -> None:
    orchestrator, engine, _ = make()
    for verb, hook in ((orchestrator.sleep, "quiesce"), (orchestrator.wake_up, "unquiesce")):
        engine.calls.clear()
        with ThreadPoolExecutor(8) as pool:
            changed = [f.result(60).changed for f in [pool.submit(verb) for _ in range(8)]]
        assert sorted(changed) == [False] * 7 + [True]
        assert engine.named().count(hook) == 1


def test_state_during_a_transition_answers_at_once() -> None:
    orchestrator, _, _ = make()
    inside, go_on = threading.Event(), threading.Event()

    def on_progress(_: Any) -> None:
        inside.set()
        assert go_on.wait(60)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(orchestrator.sleep, 1, on_progress=on_progress)
        assert inside.wait(60)
        state = orchestrator.state()
        assert "sleep" in state.transition
        assert state.progress is not None
        assert state.progress.total_bytes == 2 * SIZE
        with pytest.raises(BusyError, match="sleep by thread"):
            orchestrator.wake_up(timeout_s=0.01)
        with pytest.raises(SuspendedError, match="going on"), orchestrator.use({"lora"}):
            raise AssertionError("admitted during a transition")
        go_on.set()
        running.result(60)
    assert orchestrator.state().transition == ""


def test_a_hook_that_starts_a_transition_is_refused() -> None:
    orchestrator, engine, _ = make()
    caught = []

    def quiesce(*_: Any) -> None:
        try:
            orchestrator.wake_up()
        except BusyError as error:
            caught.append(error)

    hooks = replace(engine.hooks(), quiesce=quiesce)
    orchestrator = Orchestrator(orchestrator.backend, hooks=hooks)
    orchestrator.sleep(1)
    assert "inside sleep" in str(caught[0])


def test_closing() -> None:
    orchestrator, _, memory = make()
    with orchestrator:
        orchestrator.sleep(1)
        orchestrator.wake_up()
    orchestrator.close()
    assert memory["weights"].read() == b"w" * SIZE
    for call in (orchestrator.sleep, orchestrator.wake_up, orchestrator.release_kv_cache):
        with pytest.raises(ClosedError):
            call()
    for tags in (None, {"weights"}):
        with pytest.raises(SuspendedError, match="closed"), orchestrator.use(tags):
            raise AssertionError("admitted after close")


def test_policies_of_one_call_come_before_the_configured_ones() -> None:
    orchestrator, engine, memory = make(policies={"lora": "keep"})
    kept = TagPolicy(Policy.OFFLOAD, Policy.OFFLOAD)
    orchestrator.sleep(2, policies=Policies(dict.fromkeys(memory, kept)))
    tags = orchestrator.backend.state().tags
    assert all(tag.residencies == {Residency.OFFLOADED} for tag in tags.values())
    orchestrator.wake_up()
    assert all(memory[tag].read() == tag[:1].encode() * SIZE for tag in memory)
    drop = TagPolicy(Policy.DISCARD, Policy.DISCARD)
    engine.calls.clear()
    orchestrator.sleep(1, policies=Policies({"weights": drop}))
    with pytest.raises(PolicyConflictError):
        orchestrator.sleep(1)
    orchestrator.wake_up()
    assert ("reload", frozenset({"weights"})) in engine.calls, "they are kept at level 1 otherwise"
