"""A whole engine of a release, from ``LLM`` down to the worker, with a model of a few tensors."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from tests.adapters.vllm.model import KV_BYTES, SMALL_BYTES, Model, Runner, memory, read, write
from tests.adapters.vllm.released import ReleasedVllm
from tests.simulators.pool_torch import PoolTorch

_WORKER_BASE = "vllm/v1/worker/worker_base.py"
_WORKER = "vllm/v1/worker/gpu_worker.py"

METHODS = {
    "0.26.0": {"_get_sleep_mode_backend"},
    "0.33.0": {
        "sleep_mode_backend",
        "discard",
        "_save_sleep_parameters",
        "_restore_sleep_parameters",
        "_get_sleep_parameters",
    },
}
COMMON_METHODS = {
    "__init__",
    "sleep",
    "wake_up",
    "_maybe_get_memory_pool_context",
    "_scoped_allocator_max_split",
    "load_model",
    "initialize_from_config",
    "shutdown",
}


def model_config(**changes: Any) -> SimpleNamespace:
    """vLLM's configuration of a model, as far as sleep mode reads it."""
    values: dict[str, Any] = {
        "enable_sleep_mode": True,
        "enable_cumem_allocator": True,
        "enable_nccl_comm_suspend": False,
        "enable_return_routed_experts": False,
        "sleep_mode_backend": "cumem",
        "sleep_mode_offload_cudagraph": False,
        "sleep_preserve_parameter_names": [],
    }
    return SimpleNamespace(**{**values, **changes})


def vllm_config(**changes: Any) -> SimpleNamespace:
    """vLLM's configuration, as far as a worker reads it."""
    parts = ["lora", "load", "scheduler", "speculative", "observability", "kv_transfer"]
    return SimpleNamespace(
        **{f"{part}_config": None for part in parts},
        model_config=model_config(**changes),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(ir_enable_torch_wrap=False),
        device_config=SimpleNamespace(device="cuda", device_type="cuda"),
        enable_trace_function_call_for_thread=lambda: None,
        kernel_config=SimpleNamespace(ir_op_priority=SimpleNamespace(set_default=lambda: None)),
        parallel_config=SimpleNamespace(
            worker_cls="the worker", worker_extension_cls="", enable_fault_tolerance=False
        ),
        profiler_config=SimpleNamespace(profiler=None),
        use_v2_model_runner=False,
        weight_transfer_config=None,
    )


KV_CONFIG = SimpleNamespace(
    num_blocks=1,
    kv_cache_layout=None,
    hash_block_size=1,
    cache_hit_alignment_tokens=1,
    needs_kv_cache_zeroing=False,
)


def prepare(vllm: ReleasedVllm) -> None:
    """Put the modules of workers in place, so that plugins find them."""
    base = vllm.part(_WORKER_BASE, "WorkerBase", {"__init__"}, vllm=sys.modules["vllm"])
    wrapper_names: dict[str, Any] = {
        "instrument": lambda **_: lambda function: function,
        "logger": vllm.logger("vllm"),
        "resolve_obj_by_qualname": lambda _: _gpu_worker(vllm, base),
        "set_current_vllm_config": nullcontext,
        "worker_receiver_cache_from_config": lambda *_: None,
    }
    wrapper_names["MULTIMODAL_REGISTRY"] = SimpleNamespace(
        worker_receiver_cache_from_config=lambda *_: None
    )
    wrapper = vllm.part(
        _WORKER_BASE,
        "WorkerWrapperBase",
        {"__init__", "init_worker", "init_device", "initialize_from_config", "__getattr__"},
        **wrapper_names,
    )
    for package_name in ("vllm.v1", "vllm.v1.worker"):
        vllm.stand_in(package_name, __path__=[])
    vllm.stand_in("vllm.v1.worker.worker_base", WorkerBase=base, WorkerWrapperBase=wrapper)


def _gpu_worker(vllm: ReleasedVllm, base: type) -> type:
    methods = COMMON_METHODS | METHODS.get(vllm.version, METHODS["0.33.0"])
    worker = vllm.part(_WORKER, "Worker", methods, base, **vllm.worker_names())

    class Worker(worker):  # type: ignore[misc, valid-type]
        """The released worker, but for what needs a real device."""

        torch: PoolTorch

        def init_device(self) -> None:
            self.device = "cuda:0"
            self.model_runner = Runner(self.torch)

        def get_draft_model(self) -> None:
            return None

        def synchronize_device(self) -> None: ...

        def compile_or_warm_up_model(self) -> None: ...

        def reload_weights(self) -> None:
            assert self.model_runner.model is not None
            self.model_runner.model.fill()

    return Worker


def start_worker(torch: PoolTorch, **model: Any) -> Any:
    """Build a worker as vLLM's executors do, up to its device; return the wrapper around it."""
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    WorkerBase.torch = torch
    wrapper: Any = WorkerWrapperBase()
    arguments = {"local_rank": 0, "rank": 0, "distributed_init_method": ""}
    arguments |= {"vllm_config": vllm_config(**model), "shared_worker_lock": object()}
    wrapper.init_worker([arguments])
    wrapper.init_device()
    return wrapper


class Engine:
    """An engine in one process, by vLLM's own executor and core.

    The methods are those of ``LLM`` that are used here.
    """

    def __init__(self, vllm: ReleasedVllm, torch: PoolTorch, **model: Any) -> None:
        self._run_method = vllm.function("vllm/v1/serial_utils.py", "run_method")
        self.wrapper = start_worker(torch, **model)
        self.worker: Any = self.wrapper.worker
        self.worker.load_model()
        self.wrapper.initialize_from_config([KV_CONFIG])
        self.worker.compile_or_warm_up_model()
        self.executor = _executor(vllm, self.collective_rpc)
        self.core = _core(vllm, self.executor)
        if hasattr(self.core, "release_kv_cache_memory"):
            self.release_kv_cache_memory = self.core.release_kv_cache_memory
        self.prefix_cache_in_use = False

    @property
    def runner(self) -> Runner:
        runner: Runner = self.worker.model_runner
        return runner

    @property
    def model(self) -> Model:
        assert self.runner.model is not None
        return self.runner.model

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        return [self._run_method(self.wrapper, method, args, kwargs or {})]

    def sleep(self, level: int = 1) -> None:
        self.core.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.core.wake_up(tags)

    def reset_prefix_cache(self) -> bool:
        return not self.prefix_cache_in_use

    @property
    def asleep(self) -> frozenset[str]:
        return memory().asleep

    def works(self) -> bool:
        """Whether the model is whole and the KV cache can be written and read."""
        assert self.runner.kv_cache is not None
        write(self.runner.kv_cache, bytes([5]) * KV_BYTES)
        kv_cache = read(self.runner.kv_cache) == bytes([5]) * KV_BYTES
        runtime = self.runner.runtime
        kept = runtime is None or read(runtime) == bytes([3]) * SMALL_BYTES
        return kv_cache and kept and self.model.is_right()


def _executor(vllm: ReleasedVllm, call: Callable[..., Any]) -> Any:
    methods = {"sleep", "wake_up"}
    if any(
        getattr(node, "name", "") == "discard"
        for node in vllm.class_tree("vllm/v1/executor/abstract.py", "Executor").body
    ):
        methods |= {"discard", "is_sleeping"}
    executor = vllm.part(
        "vllm/v1/executor/abstract.py",
        "Executor",
        methods,
        logger=vllm.logger("vllm"),
        time=time,
        SLEEP_TAGS=frozenset({"weights", "kv_cache"}),
    )()
    executor.collective_rpc = call
    executor.sleeping_tags = set()
    if "is_sleeping" not in methods:
        executor.is_sleeping = False
    return executor


def _core(vllm: ReleasedVllm, executor: Any) -> Any:
    file, owner = "vllm/v1/engine/core.py", "EngineCore"
    methods = {"sleep", "wake_up", "pause_scheduler", "resume_scheduler"}
    methods |= {"is_scheduler_paused", "is_sleeping"}
    further = {"release_kv_cache_memory", "_finish_pause"}
    there = {getattr(node, "name", "") for node in vllm.class_tree(file, owner).body}
    states = SimpleNamespace(UNPAUSED="unpaused", PAUSED_ALL="all", PAUSED_NEW="new")
    core = vllm.part(
        file,
        owner,
        methods | (further & there),
        Any=Any,
        Future=Future,
        PauseMode=None,
        PauseState=states,
        RequestStatus=SimpleNamespace(FINISHED_ABORTED=0),
        get_args=lambda _: ("keep", "abort", "wait"),
        logger=vllm.logger("vllm"),
    )()
    scheduler = SimpleNamespace(
        pause_state=states.UNPAUSED,
        finish_requests=lambda *_: None,
        has_requests=bool,
    )
    scheduler.set_pause_state = lambda state: setattr(scheduler, "pause_state", state)
    core.scheduler = scheduler
    core.batch_queue = None
    core.model_executor = executor
    core._reset_caches = lambda: None
    core._set_kv_connector_handshake_metadata = lambda: None
    return core
