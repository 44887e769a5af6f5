"""vLLM's own engine code over cumem and a process checkpoint, without a GPU.

Whatever vLLM asks the device while the process sleeps would wait for ever.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.adapters.vllm.allocator import installed
from tests.adapters.vllm.conftest import MakeEngine
from tests.adapters.vllm.engine import Engine
from tests.adapters.vllm.model import memory
from tests.checkpoint.conftest import use_simulated_libraries
from tests.native.fixtures import DEVICES
from tests.simulators.cuda import Simulator, build, environment

ALL = {"weights", "kv_cache"}


@pytest.fixture(autouse=True)
def shared_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The devices of whatever process asks, such as one that measures them."""
    shared = tmp_path / "devices"
    for name, value in environment(build().parent, DEVICES, shared=shared).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def engine(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    use_simulated_libraries(monkeypatch)
    monkeypatch.setenv("SLEEPBACKENDS_BACKEND", "cumem+checkpoint")
    options = {"helper": False, "runtime_directory": str(tmp_path), "device_margin_bytes": 0}
    monkeypatch.setenv("SLEEPBACKENDS_OPTIONS", json.dumps({"checkpoint": options}))
    return make_engine()


def test_the_process_sleeps_after_vllm_has_looked_at_the_device(
    engine: Engine, simulator: Simulator
) -> None:
    assert engine.works()
    allocator = installed()
    assert allocator is not None
    usage = allocator.get_current_usage()
    for _ in range(3):
        engine.sleep(1)
        assert engine.asleep >= {*ALL, "process"}
        assert simulator.device_usage().used_bytes == 0
        assert allocator.get_current_usage() == usage, "the process is not what vLLM allocated"
        assert engine.collective_rpc("sleepbackends_status")[0]["tags"]["process"]
        engine.wake_up()
        assert not engine.asleep
        assert engine.works()


def test_waking_in_parts(engine: Engine) -> None:
    engine.sleep(1)
    engine.wake_up(["weights"])
    assert engine.asleep == {"kv_cache"}
    engine.wake_up(["kv_cache"])
    assert engine.works()


def test_sleeping_twice(engine: Engine, simulator: Simulator) -> None:
    engine.sleep(1)
    engine.collective_rpc("sleep", (1,))
    assert simulator.device_usage().used_bytes == 0
    engine.wake_up()
    assert engine.works()


def test_a_process_that_cannot_sleep_stays_awake(
    engine: Engine, simulator: Simulator, caplog: pytest.LogCaptureFixture
) -> None:
    backend: Any = memory().backend
    backend.inner.communicators = lambda: ["tp"]
    with caplog.at_level(logging.WARNING):
        engine.sleep(1)
    assert "the process stays awake" in caplog.text
    assert engine.asleep >= ALL
    assert "process" not in engine.asleep
    engine.wake_up()
    assert engine.works()


def test_the_kv_cache_alone(engine: Engine) -> None:
    engine.collective_rpc("discard", (["kv_cache"],))
    assert engine.asleep == {"kv_cache"}
    engine.sleep(1)
    assert "process" in engine.asleep
    engine.wake_up()
    assert engine.works()


def test_shutting_down_asleep(engine: Engine) -> None:
    engine.sleep(1)
    allocator = installed()
    assert allocator is not None
    allocator.release_pools()
