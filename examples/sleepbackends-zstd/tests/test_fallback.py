"""How ``release_kv_cache()`` keeps its promise on a backend that cannot release selectively."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sleepbackends import (
    Orchestrator,
    Plan,
    ReleaseStrategy,
    Residency,
    Status,
    SuspendedError,
    UnsupportedOperationError,
)
from sleepbackends.testing import FakeEngine

WEIGHTS = bytes(range(256)) * 1000 + b"odd"
KV_CACHE = b"\x07" * 70_001

Open = Callable[..., "Engine"]


class Engine(FakeEngine):
    """Some memory under both tags, and the hooks that were called."""

    def __init__(self, selective_resume: bool, **config: Any) -> None:
        super().__init__()
        options = {"selective_resume": selective_resume, "chunk_bytes": 1 << 16}
        self.orchestrator = Orchestrator.create(
            {"backend": "zstd", "options": options, **config}, hooks=self.hooks()
        )
        self.weights = self._allocate("weights", WEIGHTS)
        self.kv_cache = self._allocate("kv_cache", KV_CACHE)

    def _allocate(self, tag: str, contents: bytes) -> memoryview:
        backend: Any = self.orchestrator.backend
        with backend.region(tag) as region:
            buffer: memoryview = region.buffer(len(contents))
        buffer[:] = contents
        return buffer

    def residency(self, tag: str) -> Residency:
        (only,) = self.orchestrator.state().memory.tags[tag].residencies
        return only

    def check_untouched(self) -> None:
        assert self.named() == []
        assert self.orchestrator.state().serving
        assert self.weights == WEIGHTS
        assert self.kv_cache == KV_CACHE


@pytest.fixture
def open_engine() -> Iterator[Open]:
    engines: list[Engine] = []

    def open_engine(selective_resume: bool, **config: Any) -> Engine:
        engines.append(Engine(selective_resume, **config))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.orchestrator.close()


def check_plan(plan: Plan, strategy: ReleaseStrategy) -> None:
    assert plan.changes
    assert plan.strategy is strategy
    assert plan.degraded == (strategy is ReleaseStrategy.FULL_SUSPEND)
    assert plan.tags["kv_cache"].size_bytes == len(KV_CACHE)
    assert plan.host_bytes_needed == len(WEIGHTS)
    assert not plan.reload_tags


def test_with_selective_resume_everything_else_is_awake_again(open_engine: Open) -> None:
    engine = open_engine(selective_resume=True)
    orchestrator = engine.orchestrator
    check_plan(orchestrator.plan_release(), ReleaseStrategy.SUSPEND_AND_RELOAD)
    engine.check_untouched()
    report = orchestrator.release_kv_cache()
    assert report.strategy is ReleaseStrategy.SUSPEND_AND_RELOAD
    assert not report.degraded
    assert report.released_bytes == len(KV_CACHE)
    assert [step.operation for step in report.steps] == ["suspend", "resume"]
    assert engine.residency("weights") is Residency.RESIDENT
    assert engine.residency("kv_cache") is Residency.DISCARDED
    with orchestrator.use(["weights"]):
        assert engine.weights == WEIGHTS
    orchestrator.wake_up()
    assert orchestrator.state().status is Status.AWAKE
    assert engine.kv_cache == bytes(len(KV_CACHE))
    assert engine.weights == WEIGHTS
    assert engine.named() == ["quiesce", "drop_caches", "unquiesce"]


def test_without_it_everything_sleeps_until_woken_and_the_report_says_so(
    open_engine: Open,
) -> None:
    engine = open_engine(selective_resume=False)
    orchestrator = engine.orchestrator
    check_plan(orchestrator.plan_release(), ReleaseStrategy.FULL_SUSPEND)
    engine.check_untouched()
    report = orchestrator.release_kv_cache()
    assert report.strategy is ReleaseStrategy.FULL_SUSPEND
    assert report.degraded
    assert "wake_up()" in report.reason
    assert report.released_bytes == len(KV_CACHE) + len(WEIGHTS)
    assert engine.residency("weights") is Residency.OFFLOADED
    assert engine.residency("kv_cache") is Residency.DISCARDED
    with pytest.raises(SuspendedError), orchestrator.use(["weights"]):
        pass
    orchestrator.wake_up()
    assert orchestrator.state().status is Status.AWAKE
    assert engine.weights == WEIGHTS
    assert engine.kv_cache == bytes(len(KV_CACHE))
    assert engine.named() == ["quiesce", "drop_caches", "unquiesce"]


@pytest.mark.parametrize(
    ("selective_resume", "on_unselective"),
    [(False, "error"), (True, "error"), (False, "reload_only")],
)
def test_what_the_configuration_forbids_is_refused_before_anything_changes(
    open_engine: Open, selective_resume: bool, on_unselective: str
) -> None:
    engine = open_engine(selective_resume, on_unselective=on_unselective)
    before = engine.orchestrator.state()
    for call in (engine.orchestrator.plan_release, engine.orchestrator.release_kv_cache):
        with pytest.raises(UnsupportedOperationError, match=on_unselective):
            call()
        assert engine.orchestrator.state() == before
        engine.check_untouched()
