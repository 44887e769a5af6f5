"""Hooks that raise: FAULTED, not serving, memory intact, and the same call finishes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sleepbackends import (
    HookError,
    MechanismError,
    Orchestrator,
    Residency,
    SleepBackendsError,
    Status,
    SuspendedError,
)
from sleepbackends.testing import FakeEngine, FaultInjector, SimulatedBackend, SimulatedOptions
from sleepbackends.testing.simulated import ALL

SIZE = 1000
FRAGILE = replace(
    ALL,
    preserves_communicators=False,
    preserves_compiled_artifacts=False,
    preserves_addresses=False,
)
BEFORE_SLEEP = ("quiesce", "teardown_communicators", "drop_caches")
BEFORE_SERVING = (
    "rebuild_communicators", "reload", "recompile", "recapture_graphs", "unquiesce",
)  # fmt: skip


def make() -> tuple[Orchestrator, FakeEngine, Any]:
    engine = FakeEngine()
    backend = SimulatedBackend(SimulatedOptions(FRAGILE))
    for tag in ("weights", "kv_cache"):
        with backend.region(tag) as region:
            memory = region.buffer(SIZE)
        memory.write(b"x" * SIZE)
    return Orchestrator(backend, hooks=engine.hooks()), engine, backend


def assert_faulted(orchestrator: Orchestrator, hook: str) -> None:
    state = orchestrator.state()
    assert state.status is Status.FAULTED
    assert not state.serving
    assert hook in state.fault
    for tags in (None, {"weights"}):
        with pytest.raises(SuspendedError), orchestrator.use(tags):
            raise AssertionError("a faulted engine admitted work")


@pytest.mark.parametrize("hook", BEFORE_SLEEP)
def test_a_hook_raises_while_going_to_sleep(hook: str) -> None:
    orchestrator, engine, backend = make()
    cause = RuntimeError("no")
    engine.fail[hook] = cause
    with pytest.raises(HookError, match=hook) as caught:
        orchestrator.sleep(1)
    assert caught.value.__cause__ is cause
    assert caught.value.hook == hook
    assert caught.value.operation == "sleep"
    assert_faulted(orchestrator, hook)
    assert (backend.mapped_bytes == 0) == (hook == "drop_caches")
    engine.calls.clear()
    with pytest.raises(HookError):
        orchestrator.sleep(1)
    assert engine.named()[-1] == hook, "the hook that is owed runs again"
    engine.fail.clear()
    orchestrator.sleep(1)
    assert orchestrator.state().status is Status.ASLEEP
    assert orchestrator.wake_up().serving
    assert orchestrator.state().status is Status.AWAKE


@pytest.mark.parametrize("hook", BEFORE_SLEEP)
def test_waking_is_the_way_back_too(hook: str) -> None:
    orchestrator, engine, _ = make()
    engine.fail[hook] = RuntimeError("no")
    with pytest.raises(HookError):
        orchestrator.sleep(1)
    engine.fail.clear()
    assert orchestrator.wake_up().serving
    assert orchestrator.state().pending_hooks == ()


@pytest.mark.parametrize("hook", BEFORE_SERVING)
def test_a_hook_raises_while_waking(hook: str) -> None:
    orchestrator, engine, backend = make()
    orchestrator.sleep(2)
    engine.fail[hook] = RuntimeError("no")
    engine.calls.clear()
    with pytest.raises(HookError, match=hook):
        orchestrator.wake_up()
    assert_faulted(orchestrator, hook)
    assert backend.mapped_bytes == 2 * SIZE, "memory is back, only the hook failed"
    done = set(engine.named()) - {hook}
    engine.fail.clear()
    assert orchestrator.wake_up().serving
    again = engine.named()
    assert again[0] == hook
    assert not done & set(again), "what had succeeded is not done twice"
    assert orchestrator.state().status is Status.AWAKE


def test_a_faulted_engine_can_go_to_sleep() -> None:
    orchestrator, engine, backend = make()
    orchestrator.sleep(1)
    engine.fail["rebuild_communicators"] = RuntimeError("no")
    with pytest.raises(HookError):
        orchestrator.wake_up()
    orchestrator.sleep(1)
    assert backend.mapped_bytes == 0
    assert orchestrator.state().status is Status.ASLEEP
    assert "rebuild_communicators" in orchestrator.state().pending_hooks


def test_an_empty_wake_up_does_not_clear_a_fault() -> None:
    orchestrator, engine, _ = make()
    engine.fail["quiesce"] = RuntimeError("no")
    with pytest.raises(HookError):
        orchestrator.sleep(1)
    assert not orchestrator.wake_up([]).changed
    assert orchestrator.state().status is Status.FAULTED


def test_serving_on_fails_after_the_backend_failed() -> None:
    """The backend's error is raised, the hook's is its note, and the engine is FAULTED."""
    orchestrator, engine, backend = make()
    engine.fail["rebuild_communicators"] = RuntimeError("no")
    with FaultInjector(backend, {"save": [0]}), pytest.raises(SleepBackendsError) as caught:
        orchestrator.sleep(1)
    assert not isinstance(caught.value, HookError)
    assert "rebuild_communicators" in "".join(caught.value.__notes__)
    assert_faulted(orchestrator, "rebuild_communicators")
    engine.fail.clear()
    assert orchestrator.wake_up().serving


def test_a_hook_raises_during_a_fallback() -> None:
    orchestrator, engine, backend = make()
    backend.capabilities = replace(FRAGILE, supports_selective_release=False)
    engine.fail["drop_caches"] = RuntimeError("no")
    with pytest.raises(HookError):
        orchestrator.release_kv_cache()
    assert_faulted(orchestrator, "drop_caches")
    assert orchestrator.state().memory.tags["weights"].resident_bytes == SIZE
    engine.fail.clear()
    assert orchestrator.wake_up().serving


def test_an_engine_hears_of_contents_that_were_dropped_before_a_failure() -> None:
    orchestrator, engine, backend = make()
    with backend.region("kv_cache") as region:
        region.buffer(SIZE)
    with FaultInjector(backend, {"unmap": [2]}), pytest.raises(MechanismError):
        orchestrator.sleep(1)
    assert backend.state().tags["kv_cache"].residencies == {
        Residency.RESIDENT,
        Residency.DISCARDED,
    }
    assert orchestrator.wake_up().serving
    dropped = engine.calls.index(("drop_caches", frozenset({"kv_cache"})))
    assert dropped < engine.calls.index(("unquiesce",))
    assert ("recapture_graphs", False) in engine.calls
