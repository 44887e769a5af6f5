"""The KV cache alone: on each release, and on backends that cannot release selectively."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sleepbackends.adapters.vllm.allocator import installed
from sleepbackends.adapters.vllm.engine import release_kv_cache, restore_kv_cache
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.errors import (
    BusyError,
    DeviceMemoryError,
    MechanismError,
    UnsupportedOperationError,
)
from tests.adapters.vllm.conftest import WITHOUT_OPTION, MakeEngine
from tests.adapters.vllm.engine import Engine
from tests.adapters.vllm.model import KV_BYTES, memory
from tests.simulators.cuda import Simulator
from tests.simulators.pool_torch import PoolTorch


def status(engine: Engine) -> dict[str, Any]:
    (found,) = engine.collective_rpc("sleepbackends_status")
    assert json.loads(json.dumps(found)) == found, "it has to pass between processes"
    answer: dict[str, Any] = found
    return answer


def test_the_weights_stay(engine: Engine, simulator: Simulator) -> None:
    used = simulator.device_usage().used_bytes
    for _ in range(3):
        release_kv_cache(engine)
        assert engine.core.is_sleeping()
        assert engine.asleep == {"kv_cache"}
        assert engine.model.is_right()
        assert used - simulator.device_usage().used_bytes == KV_BYTES
        last = status(engine)["last"]
        assert last["strategy"] == "selective"
        assert last["released_bytes"] == KV_BYTES
        restore_kv_cache(engine)
        assert not engine.core.is_sleeping()
        assert engine.works()


def test_sleeping_after_a_release(engine: Engine) -> None:
    release_kv_cache(engine)
    engine.sleep(1)
    assert engine.asleep >= {"weights", "kv_cache"}
    engine.wake_up()
    assert engine.works()


def test_taking_it_back_without_room(engine: Engine, simulator: Simulator) -> None:
    release_kv_cache(engine)
    simulator.set_budget_bytes(simulator.device_usage().used_bytes)
    with pytest.raises(DeviceMemoryError):
        restore_kv_cache(engine)
    assert engine.core.is_sleeping(), "the scheduler must not go on"
    assert engine.model.is_right()
    simulator.set_budget_bytes(None)
    restore_kv_cache(engine)
    assert engine.works()


@pytest.mark.parametrize("version", WITHOUT_OPTION, indirect=True)
def test_a_cache_in_use_is_not_released(engine: Engine) -> None:
    engine.prefix_cache_in_use = True
    with pytest.raises(BusyError, match="in use"):
        release_kv_cache(engine)
    assert not engine.core.is_sleeping()
    assert engine.works()


@pytest.mark.parametrize("version", WITHOUT_OPTION, indirect=True)
def test_an_engine_without_ours_goes_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    del engine.worker.discard, engine.worker.sleepbackends_status
    slept: list[int] = []
    monkeypatch.setattr(engine, "sleep", slept.append)
    with pytest.raises(UnsupportedOperationError, match="alone"):
        release_kv_cache(engine)
    assert not slept, "requests would have been aborted"
    assert not engine.core.is_sleeping()
    assert engine.works()


@pytest.mark.parametrize("version", WITHOUT_OPTION, indirect=True)
def test_after_a_worker_failed_the_engine_stays_stopped(engine: Engine) -> None:
    """Its KV cache may be gone on some ranks."""

    def failing(tags: object) -> None:
        raise MechanismError("the driver said no")

    engine.worker.discard = failing
    with pytest.raises(MechanismError):
        release_kv_cache(engine)
    assert engine.core.is_sleeping()
    restore_kv_cache(engine)
    assert not engine.core.is_sleeping()
    assert engine.works()


@pytest.fixture(params=[False, True], ids=["", "selective_resume"])
def selective_resume(request: pytest.FixtureRequest) -> bool:
    chosen: bool = request.param
    return chosen


@pytest.fixture
def unselective(
    make_engine: MakeEngine, selective_resume: bool, monkeypatch: pytest.MonkeyPatch
) -> Engine:
    """An engine whose backend cannot release some tags alone."""
    capabilities = replace(
        CumemBackend.capabilities,
        supports_selective_release=False,
        supports_selective_resume=selective_resume,
    )
    monkeypatch.setattr(CumemBackend, "capabilities", capabilities)
    return make_engine()


def test_without_selective_release_a_fallback_does_it(
    unselective: Engine, selective_resume: bool, caplog: pytest.LogCaptureFixture
) -> None:
    release_kv_cache(unselective)
    last = status(unselective)["last"]
    assert "kv_cache" in unselective.asleep
    assert ("weights" in unselective.asleep) is not selective_resume
    assert last["strategy"] == ("suspend_and_reload" if selective_resume else "full_suspend")
    assert last["degraded"] is not selective_resume
    assert ("degraded: the backend can neither" in caplog.text) is not selective_resume
    restore_kv_cache(unselective)
    assert unselective.works()


def test_without_selective_resume_the_first_part_wakes_all(
    unselective: Engine, selective_resume: bool
) -> None:
    unselective.sleep(1)
    unselective.wake_up(["weights"])
    assert unselective.asleep == ({"kv_cache"} if selective_resume else set())
    unselective.wake_up(["kv_cache"])
    assert unselective.works()


def test_graphs_share_a_pool_that_sleeps(engine: Engine, torch: PoolTorch) -> None:
    allocator = installed()
    assert allocator is not None
    pools, graphs = set(), []
    for _ in range(3):
        with allocator.cudagraph_pool() as pool_id:
            pools.add(pool_id)
            graphs.append(torch.capture(pool_id, KV_BYTES))
    assert len(pools) == 1, "graphs that are captured apart share memory"
    content = b"\x77" * KV_BYTES
    memory().backend.cuda.write(graphs[0].address, content, 0)
    for level in (1, 2):
        engine.sleep(level)
        assert "cudagraph" in engine.asleep
        with (
            pytest.raises(Exception, match="asleep"),
            allocator.cudagraph_pool(),
        ):
            raise AssertionError("captured into memory that is not there")
        engine.wake_up(["kv_cache"])
        assert memory().read(graphs[0]) == content
        engine.wake_up()
