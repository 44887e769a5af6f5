"""Copying ahead through an orchestrator: by call, by configuration, never at a sleep's cost."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from sleepbackends import (
    ConfigurationError,
    Orchestrator,
    RequestError,
    SleepConfig,
    UnsupportedOperationError,
)
from sleepbackends.reports import Staged
from sleepbackends.testing import SimulatedBackend, SimulatedOptions
from sleepbackends.testing.simulated import ALL


class Stages(SimulatedBackend):
    """Writes down what it is to stage."""

    def __init__(self, config: SleepConfig) -> None:
        options = SimulatedOptions(replace(ALL, supports_staging=True))
        super().__init__(options, config.settings)
        self.calls: list[Any] = []
        self.refuses = False

    def stage(
        self,
        tags: Collection[str] | None = None,
        *,
        background: bool = True,
        limit_gib_s: float = 2.0,
    ) -> Any:
        if self.refuses:
            raise RequestError("not now")
        self.calls.append((tags, background, limit_gib_s))
        return "a staging"

    def staged(self) -> Staged:
        tags = {"weights": 60, "kv_cache": 10}
        return Staged(tags=tags, copy_bytes_s=20.0, packing_ratio=0.7)


def make(**values: Any) -> tuple[Orchestrator, Stages]:
    config = SleepConfig(**values)
    backend = Stages(config)
    for tag in ("weights", "kv_cache"):
        with backend.region(tag) as region:
            region.buffer(100)
    return Orchestrator(backend, config=config), backend


def test_by_call() -> None:
    orchestrator, backend = make(stage_limit_gib_s=3)
    staging: Any = orchestrator.stage(["weights"], background=False)
    assert staging == "a staging"
    orchestrator.loaded()
    orchestrator.sleep(1)
    orchestrator.wake_up()
    assert backend.calls == [(["weights"], False, 3.0)]


def test_automatically_after_loading_and_waking() -> None:
    orchestrator, backend = make(staging="automatic")
    orchestrator.loaded()
    orchestrator.sleep(1)
    assert len(backend.calls) == 1
    orchestrator.wake_up(["weights"])
    assert len(backend.calls) == 1, "only once the engine serves"
    orchestrator.wake_up()
    orchestrator.wake_up()
    assert backend.calls == [(None, True, 2.0)] * 2


def test_what_cannot_be_staged_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    orchestrator, backend = make(staging="automatic")
    backend.refuses = True
    orchestrator.sleep(1)
    with caplog.at_level(logging.WARNING):
        assert orchestrator.wake_up().serving
    assert "nothing is staged" in caplog.text


def test_the_plan_says_what_is_left_to_copy() -> None:
    orchestrator, _ = make()
    plan = orchestrator.plan_sleep(1)
    assert plan.tags["weights"].copied_bytes == 100
    assert plan.staged_bytes == 60, "what is dropped is not counted"
    assert plan.copy_s == pytest.approx(2.0)
    assert (plan.host_bytes_needed, plan.packed_bytes) == (100, 70)
    assert orchestrator.plan_sleep(2).copy_s == 0.0


def test_a_backend_that_cannot() -> None:
    backend = SimulatedBackend()
    orchestrator = Orchestrator(backend, config=SleepConfig(staging="automatic"))
    orchestrator.loaded()
    with pytest.raises(UnsupportedOperationError, match="supports_staging"):
        orchestrator.stage()
    assert orchestrator.plan_sleep(1).copy_s is None
    assert orchestrator.plan_sleep(1).packed_bytes is None


@pytest.mark.parametrize("limit", [0, -1, float("inf"), float("nan"), True])
def test_limits_that_make_no_sense(limit: float) -> None:
    with pytest.raises(ConfigurationError):
        SleepConfig(stage_limit_gib_s=limit)
