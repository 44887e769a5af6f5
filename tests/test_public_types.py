"""What the calls return and raise are the types that are public, and they say what happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from sleepbackends import (
    AllocatingBackend,
    BackendSpec,
    DiscardReport,
    EngineState,
    FailureReport,
    MechanismError,
    Orchestrator,
    Policy,
    Registry,
    ResumeReport,
    StagingBackend,
    SuspendReport,
    TagChange,
    TagPlan,
    TagState,
    TransitionReport,
    hookimpl,
)
from sleepbackends.host.backend import HostBackend
from sleepbackends.testing import (
    BufferMemory,
    FaultInjector,
    InjectedFault,
    SimulatedBackend,
)

SIZE_BYTES = 1000


@pytest.fixture
def backend() -> SimulatedBackend:
    backend = SimulatedBackend()
    with backend.region("weights") as region:
        region.buffer(SIZE_BYTES)
    return backend


def test_each_verb_returns_its_own_report(backend: SimulatedBackend) -> None:
    suspended, resumed = backend.suspend(1), backend.resume()
    discarded = backend.discard(["weights"])
    assert type(suspended) is SuspendReport
    assert suspended.level == 1
    assert type(resumed) is ResumeReport
    assert type(discarded) is DiscardReport
    for report in (suspended, resumed, discarded):
        assert isinstance(report, TransitionReport)
        assert report.changed
    change = suspended.tags["weights"]
    assert change == TagChange(
        TagState(resident_bytes=SIZE_BYTES, blocks=1),
        TagState(offloaded_bytes=SIZE_BYTES, blocks=1),
        Policy.OFFLOAD,
    )
    assert change.released_bytes == suspended.released_bytes == SIZE_BYTES


def test_a_failure_carries_a_report_of_what_is_where(backend: SimulatedBackend) -> None:
    with FaultInjector(backend, {"unmap": [0]}), pytest.raises(MechanismError) as raised:
        backend.suspend(1)
    assert isinstance(raised.value.__cause__, InjectedFault)
    report = raised.value.report
    assert type(report) is FailureReport
    assert report.tags["weights"].after.resident_bytes == SIZE_BYTES


def test_an_orchestrator_tells_what_is_and_what_would_be(backend: SimulatedBackend) -> None:
    with Orchestrator(backend) as orchestrator:
        state = orchestrator.state()
        assert isinstance(state, EngineState)
        assert state.memory.tags == {"weights": TagState(resident_bytes=SIZE_BYTES, blocks=1)}
        plan = orchestrator.plan_sleep(1)
        assert plan.tags == {"weights": TagPlan(Policy.OFFLOAD, SIZE_BYTES, SIZE_BYTES)}


def test_backends_that_own_memory_fit_the_type_for_it() -> None:
    backend: AllocatingBackend = HostBackend()
    with backend.region("weights") as region:
        memory = BufferMemory(region.buffer(4))
    memory.write(b"abcd")
    assert memory.read() == b"abcd"
    backend.close()


def test_a_backend_that_stages_has_what_its_type_says() -> None:
    from sleepbackends.cumem.backend import CumemBackend

    if CumemBackend.probe():
        able: StagingBackend = CumemBackend()
        able.close()
    for name in ("stage", "staged"):
        assert callable(getattr(StagingBackend, name))
        assert callable(getattr(CumemBackend, name))


def test_a_plugin_is_written_with_what_is_public(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = BackendSpec(name="own", target="nowhere:Backend", api_version=1)

    @hookimpl
    def sleepbackends_register_backends() -> list[BackendSpec]:
        return [spec]

    (tmp_path / "own_plugin.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_plugin  # type: ignore[import-not-found]

    own_plugin.sleepbackends_register_backends = sleepbackends_register_backends
    registry = Registry.load(environ={}, entry_points=(), builtins=["own_plugin"])
    assert registry.get("own").spec is spec
