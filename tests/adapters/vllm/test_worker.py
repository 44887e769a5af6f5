"""vLLM's own engine code over our memory: sleeping and waking, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sleepbackends.adapters.vllm.allocator import Allocator, installed
from sleepbackends.errors import DeviceMemoryError, InvalidLevelError, RequestError, UnknownTagError
from tests.adapters.vllm.conftest import WITHOUT_OPTION, MakeEngine
from tests.adapters.vllm.engine import Engine
from tests.adapters.vllm.model import KV_BYTES, WEIGHTS_BYTES, memory
from tests.simulators.cuda import Simulator

ALL = {"weights", "kv_cache"}


def ours() -> Allocator:
    allocator = installed()
    assert allocator is not None
    return allocator


def test_the_worker_s_memory_is_ours(engine: Engine, simulator: Simulator) -> None:
    assert engine.works()
    tags = ours().memory.status()["tags"]
    assert tags["weights"]["resident_bytes"] > WEIGHTS_BYTES
    assert tags["kv_cache"]["resident_bytes"] == KV_BYTES
    assert ours().get_current_usage() == sum(tag["resident_bytes"] for tag in tags.values())


def test_level_1_keeps_the_weights(engine: Engine, simulator: Simulator) -> None:
    awake, asleep = simulator.device_usage().used_bytes, set()
    for _ in range(3):
        engine.sleep(1)
        assert engine.asleep >= ALL
        asleep.add(simulator.device_usage().used_bytes)
        engine.wake_up()
        assert not engine.asleep
        assert engine.works()
    assert len(asleep) == 1, "no cycle leaves anything behind"
    assert awake - asleep.pop() >= WEIGHTS_BYTES + KV_BYTES


@pytest.mark.parametrize("order", [["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_waking_in_parts(engine: Engine, order: list[str]) -> None:
    engine.sleep(1)
    engine.wake_up([order[0]])
    assert engine.asleep == {order[1]}, "all that cannot be deferred wakes with the first"
    assert engine.executor.is_sleeping
    engine.wake_up([order[1]])
    assert not engine.executor.is_sleeping
    assert engine.works()


def test_waking_the_rest_after_a_part(engine: Engine) -> None:
    """In 0.26.0 vLLM asks for everything again, which its own allocator maps twice."""
    engine.sleep(1)
    engine.wake_up(["weights"])
    engine.wake_up()
    assert engine.works()


@pytest.mark.parametrize("order", [None, ["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_level_2_keeps_what_vllm_keeps(engine: Engine, order: list[str] | None) -> None:
    """Buffers of the model are saved by vLLM, and copied back once the weights are there."""
    engine.sleep(2)
    assert engine.asleep >= ALL
    for tags in [None] if order is None else [[tag] for tag in order]:
        engine.wake_up(tags)
    assert not engine.asleep
    assert engine.model.buffer.read() == bytes([9]) * engine.model.buffer.tensor.size_bytes
    assert memory().read(engine.model.weight) == bytes(WEIGHTS_BYTES)
    assert memory().backend.state().undefined_tags() == {"weights"}
    engine.collective_rpc("reload_weights")
    engine.collective_rpc("sleepbackends_mark_valid", args=(["weights"],))
    assert engine.works()
    assert not memory().backend.state().unusable_tags()
    engine.sleep(1)
    engine.wake_up()
    assert engine.works()


def test_buffers_of_two_sleeps_are_not_mixed_up(engine: Engine) -> None:
    for content in (b"\x21", b"\x22"):
        size = engine.model.buffer.tensor.size_bytes
        memory().backend.cuda.write(engine.model.buffer.tensor.address, content * size, 0)
        engine.sleep(2)
        engine.wake_up(["kv_cache"])
        engine.wake_up(["weights"])
        assert engine.model.buffer.read() == content * size
        # Given back once, not at each later wake-up.
        memory().backend.cuda.write(engine.model.buffer.tensor.address, b"\x23" * size, 0)
        engine.collective_rpc("wake_up")
        assert engine.model.buffer.read() == b"\x23" * size


@pytest.mark.parametrize("version", WITHOUT_OPTION, indirect=True)
def test_a_draft_model_is_rebuilt_once_its_weights_are_there(engine: Engine) -> None:
    built = []

    class Inner:
        def _build_fused_kv_buffers(self) -> None:
            assert memory().read(engine.model.weight)
            built.append(1)

    engine.worker.get_draft_model = lambda: SimpleNamespace(model=Inner())
    engine.sleep(2)
    engine.wake_up(["kv_cache"])
    assert not built
    engine.wake_up(["weights"])
    engine.collective_rpc("wake_up")
    assert built == [1]


def test_waking_without_room_changes_nothing(engine: Engine, simulator: Simulator) -> None:
    engine.sleep(1)
    before, used = memory().backend.state(), simulator.device_usage().used_bytes
    simulator.set_budget_bytes(KV_BYTES)
    for _ in range(2):
        with pytest.raises(DeviceMemoryError):
            engine.wake_up()
        assert memory().backend.state() == before
        assert simulator.device_usage().used_bytes == used
        assert engine.executor.is_sleeping
    simulator.set_budget_bytes(None)
    engine.wake_up()
    assert engine.works()


def test_a_part_that_has_room_wakes(engine: Engine, simulator: Simulator) -> None:
    engine.sleep(1)
    engine.wake_up(["weights"])
    simulator.set_budget_bytes(simulator.device_usage().used_bytes)
    with pytest.raises(DeviceMemoryError):
        engine.wake_up(["kv_cache"])
    assert engine.model.is_right()
    assert engine.asleep == {"kv_cache"}
    simulator.set_budget_bytes(None)
    engine.wake_up(["kv_cache"])
    assert engine.works()


def test_repeating_is_no_error(engine: Engine) -> None:
    engine.wake_up()
    for _ in range(2):
        engine.collective_rpc("sleep", kwargs={"level": 1})
    for tags in (["weights"], ["weights"], None, None, ["weights", "kv_cache"]):
        engine.collective_rpc("wake_up", kwargs={"tags": tags})
    assert engine.works()


def test_what_is_asleep_already_stays_as_it_is(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """After a sleep that failed on another rank vLLM may ask again, at whatever level."""
    backend = _backend(engine)
    backend.suspend(1)
    backend.suspend(2)
    assert "weights is asleep already and stays offloaded" in caplog.text
    engine.collective_rpc("wake_up")
    assert engine.works()


def _backend(engine: Engine) -> Any:
    worker = engine.worker
    method = getattr(worker, "_get_sleep_mode_backend", None)
    return method() if method else worker.sleep_mode_backend


def test_unknown_tags_and_levels_change_nothing(engine: Engine) -> None:
    with pytest.raises(InvalidLevelError):
        engine.collective_rpc("sleep", kwargs={"level": 7})
    assert engine.works()
    engine.sleep(1)
    with pytest.raises(UnknownTagError, match="weihgts") as caught:
        engine.collective_rpc("wake_up", kwargs={"tags": ["kv_cache", "weihgts"]})
    assert set(caught.value.known) >= ALL
    assert engine.asleep >= ALL
    engine.wake_up(["weihgts"])
    assert engine.asleep >= ALL, "vLLM itself ignores what it does not know"


def test_no_tags_wake_what_cannot_be_deferred(engine: Engine) -> None:
    engine.sleep(1)
    engine.collective_rpc("wake_up", kwargs={"tags": []})
    assert engine.asleep == ALL


def test_the_backend_says_what_is_so(engine: Engine) -> None:
    backend = _backend(engine)
    assert backend.state() == "RUNNING"
    assert backend.is_supported()
    assert backend.preserves_communicators()
    assert backend.preserves_compiled_artifacts()
    assert backend.preserves_graphs_with_communicators()
    assert not backend.supports_durable_storage()
    engine.sleep(1)
    engine.wake_up(["weights"])
    assert backend.state() == "SUSPENDED"
    engine.wake_up(["kv_cache"])
    assert backend.state() == "RUNNING"


def test_policies_of_our_configuration_count(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLEEPBACKENDS_POLICIES__KV_CACHE", "offload")
    monkeypatch.setenv("SLEEPBACKENDS_POLICIES__WEIGHTS", "keep")
    engine = make_engine()
    assert engine.works()
    engine.sleep(2)
    assert "weights" not in engine.asleep
    engine.wake_up()
    assert engine.runner.kv_cache is not None
    assert memory().read(engine.runner.kv_cache) == bytes([5]) * KV_BYTES


def test_a_quantized_kv_cache_wakes_after_the_weights(engine: Engine) -> None:
    """Where vLLM resets scales at the wake-up of the cache, they lie among the weights."""
    engine.worker.cache_config.cache_dtype = "fp8"
    engine.sleep(1)
    if ours().wake_order is None:
        engine.wake_up(["kv_cache"])
    else:
        with pytest.raises(RequestError, match="wake 'weights' first"):
            engine.wake_up(["kv_cache"])
        assert engine.asleep >= ALL
        engine.worker.use_v2_model_runner = True
        engine.wake_up(["kv_cache"])
    engine.wake_up(["weights"])
    assert engine.works()


def test_shutting_down_gives_pinned_memory_back(
    engine: Engine, simulator: Simulator, make_engine: MakeEngine
) -> None:
    engine.sleep(1)
    engine.wake_up()
    assert simulator.process_usage().pinned_bytes
    first, alive = ours(), engine.model.weight
    engine.worker.shutdown()
    assert simulator.process_usage().pinned_bytes == 0
    assert first.get_current_usage() == WEIGHTS_BYTES
    assert installed() is None
    second = make_engine()
    assert ours() is not first, "what is left of one engine keeps no other from starting"
    assert second.works()
    del alive
