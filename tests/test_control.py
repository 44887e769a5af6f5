"""Cancelling a transition from another thread: undone or finished, never half done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from sleepbackends import Control, Orchestrator, ReleaseStrategy, Status
from sleepbackends.errors import BusyError, TransitionCancelledError, TransitionTimeoutError
from sleepbackends.testing import SimulatedOptions
from sleepbackends.testing.simulated import ALL
from tests.gated import Gate, make


def test_check_and_advance_raise_once_cancelled() -> None:
    control = Control()
    control.check()
    control.start("suspend", 2)
    control.advance(1)
    control.cancel()
    with pytest.raises(TransitionCancelledError, match="suspend was cancelled"):
        control.check()
    with pytest.raises(TransitionCancelledError):
        control.advance(1)
    assert control.progress.done_bytes == 2, "what was done is counted all the same"


def test_after_commit_a_cancellation_is_ignored_for_good_and_a_deadline_for_the_operation() -> None:
    control = Control(timeout_s=0)
    control.start("suspend", 1)
    control.commit()
    control.cancel()
    control.check()
    control.start("resume", 1)
    with pytest.raises(TransitionTimeoutError):
        control.check()


def test_wait_tries_once_even_without_time_and_tells() -> None:
    tried: list[float] = []

    def attempt(seconds: float) -> bool:
        tried.append(seconds)
        return len(tried) == 1

    assert Control(timeout_s=0).wait(attempt)
    assert not Control(timeout_s=0).wait(attempt)
    assert tried == [0.0, 0.0]


def cancelled_at(gate: Gate, control: Control, call: Callable[[], object]) -> BaseException | None:
    """Cancel a call when it has come to a gate; return what it raised."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        assert gate.reached.wait(30)
        control.cancel()
        gate.open.set()
        return future.exception(30)


def test_a_sleep_cancelled_during_the_copy_is_rolled_back_and_the_engine_serves_on() -> None:
    orchestrator, backend, engine = make()
    before = orchestrator.state()
    bytes_before = {address: bytes(data) for address, data in backend.mapped.items()}
    control, backend.saving = Control(), Gate()
    error = cancelled_at(backend.saving, control, lambda: orchestrator.sleep(control=control))
    assert isinstance(error, TransitionCancelledError)
    assert error.operation == "suspend"
    assert not error.report.changed
    assert orchestrator.state() == before
    assert backend.mapped == bytes_before
    assert engine.named()[-1] == "unquiesce"
    backend.saving = None
    assert orchestrator.sleep().changed


def test_a_wake_up_cancelled_during_the_copy_leaves_everything_asleep() -> None:
    orchestrator, backend, _ = make()
    orchestrator.sleep()
    before = orchestrator.state()
    control, backend.restoring = Control(), Gate()
    error = cancelled_at(backend.restoring, control, lambda: orchestrator.wake_up(control=control))
    assert isinstance(error, TransitionCancelledError)
    assert orchestrator.state() == before
    assert orchestrator.wake_up().serving


def test_waiting_for_the_turn_is_cancelled_without_anything_having_happened() -> None:
    orchestrator, backend, engine = make()
    backend.saving = Gate()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(orchestrator.sleep)
        assert backend.saving.reached.wait(30)
        control = Control()
        second = pool.submit(orchestrator.wake_up, control=control)
        control.cancel()
        error = second.exception(30)
        assert not first.done(), "the first still holds the lock"
        backend.saving.open.set()
        assert first.result(30).changed
    assert isinstance(error, TransitionCancelledError)
    assert error.report is None
    assert engine.named() == ["quiesce", "drop_caches"]


def test_waiting_for_users_of_the_memory_is_cancelled_and_the_engine_serves_on() -> None:
    orchestrator, _, engine = make()
    control = Control()
    quiet = threading.Event()
    engine.quiesce = lambda mode, deadline_s: quiet.set()  # type: ignore[method-assign]
    orchestrator = Orchestrator(orchestrator.backend, hooks=engine.hooks())
    with ThreadPoolExecutor(1) as pool, orchestrator.use():
        future = pool.submit(orchestrator.sleep, control=control)
        assert quiet.wait(30)
        control.cancel()
        assert isinstance(future.exception(30), TransitionCancelledError)
        assert orchestrator.state().status is Status.AWAKE
    assert engine.named() == ["unquiesce"]


def test_the_deadline_of_a_wait_for_users_still_holds() -> None:
    orchestrator, _, _ = make()
    with ThreadPoolExecutor(1) as pool, orchestrator.use(holder="request 7"):
        error = pool.submit(orchestrator.sleep, timeout_s=0.05).exception(30)
    assert isinstance(error, BusyError)
    assert error.holders == ("request 7",)


def test_a_release_in_two_steps_is_finished_once_contents_were_dropped() -> None:
    unselective = SimulatedOptions(replace(ALL, supports_selective_release=False))
    orchestrator, backend, _ = make(unselective)
    control, backend.restoring = Control(), Gate()
    error = cancelled_at(
        backend.restoring, control, lambda: orchestrator.release_kv_cache(control=control)
    )
    assert error is None
    state = orchestrator.state().memory
    assert state.asleep_tags() == {"kv_cache"}
    assert orchestrator.plan_release(["lora"]).strategy is ReleaseStrategy.SUSPEND_AND_RELOAD
