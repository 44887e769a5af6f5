"""Memory of captured graphs, by vLLM's own routing, in the release that can offload it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from sleepbackends.cumem.backend import CumemBackend
from tests.adapters.vllm.conftest import WITH_OPTION, MakeEngine
from tests.adapters.vllm.model import memory
from tests.adapters.vllm.released import ReleasedVllm
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.pool_torch import PoolTorch

pytestmark = pytest.mark.parametrize("version", WITH_OPTION, indirect=True)


@pytest.fixture
def config(vllm: ReleasedVllm) -> Any:
    """vLLM's class of configurations, as far as it decides about graphs."""
    modes = SimpleNamespace(NONE="none")
    part = vllm.part(
        "vllm/config/vllm.py", "VllmConfig", {"use_cumem_cudagraph_pool"}, CUDAGraphMode=modes
    )
    vllm.stand_in("vllm.config", VllmConfig=part)
    vllm.stand_in("vllm.compilation", __path__=[str(vllm.root / "vllm" / "compilation")])
    return part


def configured(config: Any, model_config: Any, mode: str = "full") -> Any:
    made = config()
    made.model_config = model_config
    made.compilation_config = SimpleNamespace(cudagraph_mode=mode)
    return made


def test_graphs_are_captured_into_our_pool(
    config: Any, make_engine: MakeEngine, torch: PoolTorch, vllm: ReleasedVllm
) -> None:
    engine = make_engine(sleep_mode_offload_cudagraph=True)
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"
    from vllm.compilation.cudagraph_pool import capture_outside_cumem_pool, capture_pool

    ours = configured(config, engine.worker.model_config)
    graphs, pools = [], set()
    for _ in range(2):
        with capture_pool((7, 7), ours) as pool_id:
            pools.add(pool_id)
            graphs.append(torch.capture(pool_id, GRANULE_BYTES))
    assert len(pools) == 1
    assert set(vllm.graph_pool_ids) == pools, "NCCL captures into it too"
    assert memory().backend.state().tags["cudagraph"].resident_bytes == 2 * GRANULE_BYTES
    with capture_outside_cumem_pool(), capture_pool((7, 7), ours) as pool_id:
        assert pool_id == (7, 7)
    memory().backend.cuda.write(graphs[0].address, b"\x31" * GRANULE_BYTES, 0)
    engine.sleep(2)
    assert "cudagraph" in engine.asleep
    engine.wake_up(["weights"])
    assert memory().read(graphs[0]) == b"\x31" * GRANULE_BYTES


def test_other_engines_are_answered_as_before(config: Any, make_engine: MakeEngine) -> None:
    engine = make_engine(sleep_mode_offload_cudagraph=True)
    model = engine.worker.model_config
    asked = configured(config, model)
    assert asked.use_cumem_cudagraph_pool
    assert asked.model_config is model
    assert not configured(config, model, mode="none").use_cumem_cudagraph_pool
    assert not configured(config, None).use_cumem_cudagraph_pool
    assert model.sleep_mode_backend == "sleepbackends"
    for backend, expected in (("cumem", True), ("another", False)):
        other = SimpleNamespace(**{**vars(model), "sleep_mode_backend": backend})
        assert configured(config, other).use_cumem_cudagraph_pool is expected
    off = SimpleNamespace(**{**vars(model), "sleep_mode_offload_cudagraph": False})
    assert not configured(config, off).use_cumem_cudagraph_pool


def test_unasked_graphs_stay_where_they_are(config: Any, make_engine: MakeEngine) -> None:
    before = config.use_cumem_cudagraph_pool
    engine = make_engine()
    assert config.use_cumem_cudagraph_pool is before
    assert not configured(config, engine.worker.model_config).use_cumem_cudagraph_pool


def test_a_backend_without_a_pool_for_graphs_leaves_them_resident(
    config: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(CumemBackend, "graph_pool")
    engine = make_engine(sleep_mode_offload_cudagraph=True)
    assert not configured(config, engine.worker.model_config).use_cumem_cudagraph_pool


def test_lora_state_survives_level_2(
    config: Any, make_engine: MakeEngine, torch: PoolTorch, vllm: ReleasedVllm
) -> None:
    """vLLM keeps adapters under the tag ``runtime``, which no level drops."""
    engine = make_engine()
    from vllm.device_allocator import get_mem_allocator_instance

    class Manager:
        def __init__(self, *_: object) -> None: ...

        def create_lora_manager(self, *_: object) -> Any:
            return torch.empty(GRANULE_BYTES)

    mixin = vllm.part(
        "vllm/v1/worker/lora_model_runner_mixin.py",
        "LoRAModelRunnerMixin",
        {"load_lora_model"},
        LRUCacheWorkerLoRAManager=Manager,
        current_platform=vllm.platform,
        get_mem_allocator_instance=get_mem_allocator_instance,
        nullcontext=nullcontext,
        supports_lora=lambda _: True,
    )()
    model = SimpleNamespace(embedding_modules=None)
    adapter = mixin.load_lora_model(model, engine.worker.vllm_config, None)
    content = b"\x44" * GRANULE_BYTES
    memory().backend.cuda.write(adapter.address, content, 0)
    engine.sleep(2)
    engine.wake_up(["kv_cache"])
    assert memory().read(adapter) == content


def test_scratch_is_dropped_and_usable_after_any_wake_up(
    config: Any, make_engine: MakeEngine, torch: PoolTorch, vllm: ReleasedVllm
) -> None:
    engine = make_engine()
    with engine.worker._maybe_get_memory_pool_context("workspace"):
        scratch = torch.empty(GRANULE_BYTES)
    memory().backend.cuda.write(scratch.address, b"\x01" * GRANULE_BYTES, 0)
    engine.sleep(1)
    assert memory().backend.state().tags["workspace"].discarded_bytes == GRANULE_BYTES
    engine.wake_up(["weights"])
    assert memory().read(scratch) == bytes(GRANULE_BYTES)
    assert "workspace" not in memory().backend.state().unusable_tags() | engine.asleep
