"""Observers are told of every transition, in order, and can disturb none."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sleepbackends import (
    BusyError,
    ClosedError,
    HookError,
    Orchestrator,
    SleepBackendsError,
    UnknownTagError,
)
from sleepbackends.observers import Observation
from tests.gated import Gate, make


def observed() -> tuple[Orchestrator, list[Observation]]:
    orchestrator, _, _ = make()
    seen: list[Observation] = []
    orchestrator.observers.add(seen.append)
    return orchestrator, seen


def test_each_transition_is_told_with_what_was_before_and_its_report() -> None:
    orchestrator, seen = observed()
    before = orchestrator.state().memory
    reports = [
        orchestrator.sleep(),
        orchestrator.wake_up(),
        orchestrator.release_kv_cache(),
        orchestrator.wake_up(),
        orchestrator.mark_valid({"weights"}),
    ]
    assert [one.operation for one in seen] == [
        "sleep", "wake_up", "release", "wake_up", "mark_valid",
    ]  # fmt: skip
    assert [one.report for one in seen] == reports
    assert seen[0].before == before
    assert all(one.error is None for one in seen)
    assert all(one.seconds >= one.report.seconds for one in seen if one.report)


def test_what_is_raised_is_told_too() -> None:
    orchestrator, seen = observed()
    with pytest.raises(UnknownTagError):
        orchestrator.wake_up(["nothing"])
    assert seen[0].before is not None
    assert seen[0].report is None
    assert isinstance(seen[0].error, UnknownTagError)
    assert seen[0].error.operation == "wake_up"
    orchestrator.close()
    with pytest.raises(ClosedError):
        orchestrator.sleep()
    assert isinstance(seen[1].error, ClosedError)
    assert seen[1].before is None


def test_a_transition_that_never_had_its_turn_is_told_with_how_long_it_waited() -> None:
    orchestrator, backend, _ = make()
    seen: list[Observation] = []
    orchestrator.observers.add(seen.append)
    backend.saving = Gate()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(orchestrator.sleep)
        assert backend.saving.reached.wait(30)
        asked = time.perf_counter()
        with pytest.raises(BusyError):
            # The deadline counts from a little before the wait, which is told from its beginning.
            orchestrator.wake_up(timeout_s=0.1)
        waited_s = time.perf_counter() - asked
        backend.saving.open.set()
        first.result(30)
    assert [one.operation for one in seen] == ["wake_up", "sleep"]
    assert isinstance(seen[0].error, BusyError)
    assert seen[0].before is None
    assert 0.05 <= seen[0].seconds <= waited_s


def test_an_observer_that_raises_fails_nothing_and_silences_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    orchestrator, seen = observed()
    orchestrator.observers.remove(seen.append)

    def broken(observation: Observation) -> None:
        raise RuntimeError("no disk")

    orchestrator.observers.add(broken)
    orchestrator.observers.add(seen.append)
    with caplog.at_level(logging.ERROR):
        assert orchestrator.sleep().changed
    assert "an observer of sleep raised" in caplog.text
    assert len(seen) == 1
    orchestrator.observers.remove(broken)
    orchestrator.observers.remove(broken)
    caplog.clear()
    orchestrator.wake_up()
    assert not caplog.text
    assert len(seen) == 2


def test_an_observer_sees_the_fault_and_may_not_start_a_transition() -> None:
    orchestrator, _, engine = make()
    engine.fail["drop_caches"] = RuntimeError("no")
    states, errors = [], []

    def observer(observation: Observation) -> None:
        states.append(orchestrator.state())
        try:
            orchestrator.wake_up()
        except SleepBackendsError as error:
            errors.append(error)

    orchestrator.observers.add(observer)
    with pytest.raises(HookError):
        orchestrator.sleep()
    assert states[0].fault
    assert states[0].transition.startswith("sleep by")
    assert isinstance(errors[0], BusyError)
