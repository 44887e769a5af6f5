"""What is exported of an engine in one process."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse

from sleepbackends import (
    Control,
    HookError,
    Orchestrator,
    RequestError,
    SleepBackendsError,
    UnknownTagError,
    UnsupportedOperationError,
)
from sleepbackends.errors import TransitionCancelledError
from sleepbackends.metrics import METRIC_NAMES, Metrics
from sleepbackends.testing import FaultInjector, SimulatedOptions
from sleepbackends.testing.simulated import ALL
from tests.gated import SIZE, Gate, make


def value(metrics: Metrics, name: str, engine: str = "0", **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"engine": engine, **labels})


def test_gauges_follow_the_engine_without_being_set() -> None:
    orchestrator, _, _ = make()
    metrics = Metrics()
    metrics.observe(orchestrator, engine="a")
    for change, bytes_of, serving in (
        (None, {"weights": "resident", "kv_cache": "resident"}, 1),
        (orchestrator.sleep, {"weights": "offloaded", "kv_cache": "discarded"}, 0),
        (orchestrator.wake_up, {"weights": "resident", "kv_cache": "resident"}, 1),
    ):
        if change is not None:
            change()
        for tag, here in bytes_of.items():
            for residency in ("resident", "offloaded", "discarded", "undefined"):
                exported = value(
                    metrics, "sleepbackends_tag_bytes", "a", tag=tag, residency=residency
                )
                assert exported == (SIZE if residency == here else 0)
        assert value(metrics, "sleepbackends_engine_serving", "a") == serving
    assert value(metrics, "sleepbackends_engine_faulted", "a") == 0


def test_a_transition_is_in_flight_while_it_is() -> None:
    orchestrator, backend, _ = make()
    metrics = Metrics()
    metrics.observe(orchestrator)
    backend.saving = Gate()
    thread = threading.Thread(target=orchestrator.sleep)
    thread.start()
    assert backend.saving.reached.wait(30)
    assert value(metrics, "sleepbackends_transitions_in_flight") == 1
    backend.saving.open.set()
    thread.join(30)
    assert value(metrics, "sleepbackends_transitions_in_flight") == 0


def counts(metrics: Metrics, operation: str) -> dict[str, float]:
    """How many transitions were timed, by outcome."""
    return {
        sample.labels["outcome"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "sleepbackends_transition_seconds_count"
        and sample.labels["operation"] == operation
    }


def test_transitions_are_timed_and_counted_by_outcome() -> None:
    orchestrator, backend, engine = make()
    metrics = Metrics()
    metrics.observe(orchestrator)
    assert value(metrics, "sleepbackends_transition_copied_bytes_total", operation="sleep") == 0
    orchestrator.sleep()
    orchestrator.sleep()
    orchestrator.wake_up()
    assert value(metrics, "sleepbackends_transition_copied_bytes_total", operation="sleep") == (
        2 * SIZE
    )
    assert value(metrics, "sleepbackends_transition_copied_bytes_total", operation="wake_up") == (
        2 * SIZE
    )
    with pytest.raises(UnknownTagError):
        orchestrator.release(["nothing"])
    with FaultInjector(backend, {"save": [0]}), pytest.raises(SleepBackendsError):
        orchestrator.sleep()
    control = Control()
    control.cancel()
    with pytest.raises(TransitionCancelledError):
        orchestrator.sleep(control=control)
    engine.fail["drop_caches"] = RuntimeError("no")
    with pytest.raises(HookError):
        orchestrator.release_kv_cache()
    assert value(metrics, "sleepbackends_engine_faulted") == 1
    assert counts(metrics, "sleep") == {"changed": 1, "unchanged": 1, "failed": 1, "cancelled": 1}
    assert counts(metrics, "wake_up") == {"changed": 1}
    assert counts(metrics, "release") == {"refused": 1, "failed": 1}
    failed = "sleepbackends_transitions_failed_total"
    assert value(metrics, failed, operation="sleep", error="MechanismError") == 1
    assert value(metrics, failed, operation="release", error="HookError") == 1
    assert value(metrics, failed, operation="release", error="UnknownTagError") is None


def test_degraded_releases_are_counted() -> None:
    neither = replace(ALL, supports_selective_release=False, supports_selective_resume=False)
    orchestrator, _, _ = make(SimulatedOptions(neither))
    metrics = Metrics()
    metrics.observe(orchestrator)
    degraded = "sleepbackends_transitions_degraded_total"
    assert value(metrics, degraded, operation="release") == 0
    orchestrator.release_kv_cache()
    assert value(metrics, degraded, operation="release") == 1


def test_several_engines_in_one_registry_and_one_forgotten() -> None:
    first, second = make()[0], make()[0]
    metrics = Metrics()
    metrics.observe(first, engine="a")
    metrics.observe(second, engine="b")
    second.sleep()
    state = "sleepbackends_engine_sleep_state"
    assert value(metrics, state, "a", sleep_state="awake") == 1
    assert value(metrics, state, "b", sleep_state="awake") == 0
    with pytest.raises(RequestError, match=r"'a' is observed already"):
        metrics.observe(second, engine="a")
    metrics.forget("b")
    second.wake_up()
    assert value(metrics, state, "b", sleep_state="awake") is None
    assert counts(metrics, "wake_up") == {}
    with pytest.raises(RequestError, match=r"'b' is not observed; known engines: \['a'\]"):
        metrics.forget("b")


def test_the_text_format_has_every_metric_by_its_documented_name() -> None:
    orchestrator, _, engine = make()
    registry = CollectorRegistry(auto_describe=True)
    Counter("of_somebody_else", "Shares the registry.", registry=registry)
    metrics = Metrics(registry)
    metrics.observe(orchestrator)
    engine.fail["drop_caches"] = RuntimeError("no")
    with pytest.raises(HookError):
        orchestrator.sleep()
    families = {family.name: family for family in parse(generate_latest(registry).decode())}
    ours = {
        f"{name}_total" if family.type == "counter" else name
        for name, family in families.items()
        if name.startswith("sleepbackends_") and not name.endswith("_created")
    }
    assert ours == set(METRIC_NAMES)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Metrics(registry)


def test_an_own_registry_by_default() -> None:
    assert Metrics().registry is not Metrics().registry


def test_nothing_is_imported_before_it_is_used_and_what_is_missing_is_named() -> None:
    code = (
        "import sys, sleepbackends, sleepbackends.metrics as metrics\n"
        "assert 'prometheus_client' not in sys.modules\n"
        "sys.modules['prometheus_client'] = None\n"
        "metrics.Metrics()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "UnsupportedOperationError: metrics need prometheus_client" in done.stderr
    assert "pip install 'sleepbackends[server]'" in done.stderr


def test_missing_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UnsupportedOperationError):
        Metrics()


def test_a_transition_is_not_failed_by_a_metric_that_cannot_be_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    orchestrator: Orchestrator = make()[0]
    metrics = Metrics()
    metrics.observe(orchestrator)
    monkeypatch.setattr(metrics, "_seconds", None)
    assert orchestrator.sleep().changed
    assert "an observer of sleep raised" in caplog.text
