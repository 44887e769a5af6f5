"""What happens where our memory cannot be used: vLLM goes its own way, and one line says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sleepbackends.adapters.vllm import plugin
from sleepbackends.adapters.vllm.allocator import installed
from sleepbackends.adapters.vllm.memory import Memory
from sleepbackends.availability import Availability
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.orchestrator import Orchestrator
from tests.adapters.vllm.conftest import WITH_OPTION, MakeEngine
from tests.adapters.vllm.engine import Engine, prepare, start_worker
from tests.adapters.vllm.released import ReleasedVllm
from tests.simulators.cuda import Simulator
from tests.simulators.pool_torch import PoolTorch

Start = Callable[..., Any]


@pytest.fixture
def start(
    vllm: ReleasedVllm, torch: PoolTorch, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> Start:
    monkeypatch.setenv("SLEEPBACKENDS_VLLM", "1")
    monkeypatch.setenv("SLEEPBACKENDS_BACKEND", "cumem")
    prepare(vllm)
    CudaDriver()

    def begin(**model: Any) -> Any:
        return start_worker(torch, **model).worker

    return begin


def check_vllm_s_own(worker: Any, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory

    assert installed() is None
    assert type(CuMemAllocator.get_instance()) is CuMemAllocator
    assert type(SleepModeBackendFactory.create_backend(worker.model_config)) is CuMemBackend
    warnings = [r for r in caplog.records if r.name == "vllm.sleepbackends"]
    assert [record.levelname for record in warnings] == ["WARNING"]
    assert reason in warnings[0].getMessage()
    assert not hasattr(worker, "sleepbackends_status")


def test_it_starts(start: Start) -> None:
    worker = start()
    allocator = installed()
    assert allocator is not None
    assert allocator.get_current_usage() == 0, "what was tried is gone"
    assert worker.model_config.sleep_mode_backend == "sleepbackends"
    allocator.release_pools()


@pytest.mark.parametrize("version", WITH_OPTION, indirect=True)
def test_a_name_that_is_in_no_list_is_known_once_it_is_used(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of two backends together."""
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    monkeypatch.setattr(plugin, "_offer", lambda: None)
    worker = start(sleep_mode_backend="sleepbackends-cumem")
    allocator = installed()
    assert allocator is not None
    backend = SleepModeBackendFactory.create_backend(worker.model_config)
    assert backend.state() == "RUNNING"
    allocator.release_pools()


@pytest.mark.parametrize("name", ["cumem", "sleepbackends", "sleepbackends-cumem"])
def test_a_missing_driver(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    nothing = Availability(False, "there is no driver", "install one")
    monkeypatch.setattr(CumemBackend, "probe", classmethod(lambda _: nothing))
    worker = start(sleep_mode_backend=name)
    check_vllm_s_own(worker, caplog, "there is no driver")


@pytest.mark.parametrize("kind", ["rocm", "xpu"])
def test_another_platform(
    start: Start, vllm: ReleasedVllm, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    vllm.platform.kind = kind
    start(sleep_mode_backend="sleepbackends")
    assert installed() is None
    assert "NVIDIA GPUs only" in caplog.text


def test_a_backend_without_gpu_memory(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLEEPBACKENDS_BACKEND", "host")
    check_vllm_s_own(start(), caplog, "does not reach the backend 'host'")


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("SLEEPBACKENDS_BACKEND", "cumen", "cumen"),
        ("SLEEPBACKENDS_OPTIONS__VERIFY", "perhaps", "verify"),
        ("SLEEPBACKENDS_TIMEOUT", "3", "SLEEPBACKENDS_TIMEOUT"),
    ],
)
def test_a_wrong_configuration(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
    reason: str,
) -> None:
    monkeypatch.setenv(variable, value)
    check_vllm_s_own(start(), caplog, reason)


def test_a_mistake_of_ours(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = []

    def mistake(memory: Memory) -> None:
        opened.append(memory)
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(Memory, "_try", mistake)
    check_vllm_s_own(start(), caplog, "a mistake")
    assert "Traceback" in caplog.text
    assert [memory.closed for memory in opened] == [True]


def test_an_engine_that_never_came_up_makes_room(start: Start) -> None:
    start()
    first = installed()
    start()
    second = installed()
    assert first is not None
    assert second is not None
    assert first.memory.closed
    assert not second.memory.closed
    second.close()


@pytest.mark.parametrize("shut_down", [True, False])
@pytest.mark.parametrize("model", [{"enable_sleep_mode": False}, {"sleep_mode_backend": "other"}])
def test_an_engine_after_ours_finds_vllm_s_own(
    start: Start, shut_down: bool, model: dict[str, Any]
) -> None:
    from vllm.device_allocator.cumem import CuMemAllocator

    first = start()
    if shut_down:
        first.shutdown()
    start(**model)
    assert type(CuMemAllocator.get_instance()) is CuMemAllocator


def test_so_does_one_that_could_not_use_ours(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    monkeypatch.setenv("SLEEPBACKENDS_BACKEND", "host")
    check_vllm_s_own(start(), caplog, "does not reach the backend 'host'")


def test_contents_are_staged_once_the_engine_is_ready(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ready = []

    def loaded(orchestrator: Orchestrator) -> None:
        ready.append(orchestrator)
        raise RuntimeError("staging failed")

    monkeypatch.setattr(Orchestrator, "loaded", loaded)
    worker = start()
    allocator = installed()
    assert allocator is not None
    assert not ready
    worker.compile_or_warm_up_model()
    assert ready == [allocator.memory.orchestrator]
    assert "vLLM goes on" in caplog.text
    allocator.close()


def test_only_a_missing_call_is_added(start: Start, vllm: ReleasedVllm) -> None:
    worker = start()
    assert ("discard" in vars(worker)) is not hasattr(type(worker), "discard")
    allocator = installed()
    assert allocator is not None
    allocator.close()


def test_an_engine_that_uses_vllm_s_allocator_is_not_disturbed(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.device_allocator.cumem import CuMemAllocator

    first = CuMemAllocator.get_instance()
    monkeypatch.setattr(first, "get_current_usage", lambda: 1)
    worker = start()
    assert CuMemAllocator.instance is first
    check_vllm_s_own(worker, caplog, "another engine in this process")


def test_a_second_engine_beside_ours_is_refused_by_vllm(
    engine: Engine, make_engine: MakeEngine
) -> None:
    """It is vLLM that allows one engine in a process."""
    ours = installed()
    with pytest.raises(AssertionError, match="one instance per process"):
        make_engine()
    assert installed() is ours
    assert engine.works()
