"""What the adapter relies on, read from and tried on each release's own sources."""

from __future__ import annotations

import ast
import inspect
import logging
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from sleepbackends.adapters.vllm.allocator import Allocator
from sleepbackends.adapters.vllm.choice import PLUGIN, VLLM_OWN, configuration
from sleepbackends.adapters.vllm.memory import CUDA_GRAPHS, DEFERRABLE
from sleepbackends.adapters.vllm.versions import SUPPORTED, Release, find
from sleepbackends.policies import Policy
from tests.adapters.vllm.conftest import WITH_OPTION
from tests.adapters.vllm.released import ReleasedVllm

ALLOCATOR = "vllm/device_allocator/cumem.py"
INTERFACE = "vllm/device_allocator/sleep_mode_backend.py"
WORKER = "vllm/v1/worker/gpu_worker.py"
VERBS = {"suspend", "resume", "state", "discard"}
FLAGS = {
    "is_supported",
    "preserves_communicators",
    "preserves_compiled_artifacts",
    "preserves_graphs_with_communicators",
    "supports_durable_storage",
}
TAGS = {"weights", "kv_cache", "runtime", "workspace", "cudagraph"}


@pytest.fixture
def release(version: str) -> Release:
    found = find(version, forced=True)
    assert found is not None
    return found


def public(cls: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {
        node.name: node
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def methods(vllm: ReleasedVllm, file: str, owner: str) -> list[str]:
    return [getattr(node, "name", "") for node in vllm.class_tree(file, owner).body]


def names(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args if argument.arg not in ("self", "cls")]


def check_accepts(ours: Any, theirs: ast.FunctionDef) -> None:
    """Check that a method of ours can be called in every way that theirs can."""
    signature = inspect.signature(ours)
    required = len(names(theirs)) - len(theirs.args.defaults)
    signature.bind(None, *[None] * required)
    signature.bind(None, *[None] * len(names(theirs)))
    signature.bind(None, **dict.fromkeys(names(theirs)))
    assert not theirs.args.kwonlyargs


def test_our_allocator_has_the_surface_of_vllm_s(vllm: ReleasedVllm) -> None:
    theirs = public(vllm.class_tree(ALLOCATOR, "CuMemAllocator"))
    theirs.pop("get_instance")
    theirs |= public(vllm.class_tree("vllm/device_allocator/__init__.py", "MemAllocator"))
    for name, method in theirs.items():
        check_accepts(getattr(Allocator, name), method)


def test_our_backend_has_all_verbs_and_flags(vllm: ReleasedVllm) -> None:
    from sleepbackends.adapters.vllm.sleep_backend import SleepBackend

    theirs = public(vllm.class_tree(INTERFACE, "SleepModeBackend"))
    assert theirs.keys() <= VERBS | FLAGS, "vLLM asks for more than before"
    assert theirs.keys() >= (VERBS | FLAGS) - {"discard"}
    for name, method in theirs.items():
        ours = inspect.getattr_static(SleepBackend, name)
        check_accepts(getattr(ours, "__func__", ours), method)
    assert not SleepBackend.__abstractmethods__


def test_the_factory_creates_by_name_and_without_arguments(vllm: ReleasedVllm) -> None:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    class Config:
        sleep_mode_backend = "ours"

    SleepModeBackendFactory.register_backend("ours", __name__, "Created")
    assert isinstance(SleepModeBackendFactory.create_backend(Config), Created)
    with pytest.raises(ValueError, match="already"):
        SleepModeBackendFactory.register_backend("ours", __name__, "Created")


class Created:
    """What the factory creates; it asks it one thing before."""

    @classmethod
    def is_supported(cls) -> bool:
        return True


def test_get_instance_returns_whatever_is_there(vllm: ReleasedVllm) -> None:
    from vllm.device_allocator import get_mem_allocator_instance
    from vllm.device_allocator.cumem import CuMemAllocator

    CuMemAllocator.instance = sentinel = object()
    assert get_mem_allocator_instance() is sentinel


def test_vllm_s_plugins_are_of_this_group(vllm: ReleasedVllm) -> None:
    from vllm.plugins import DEFAULT_PLUGINS_GROUP

    assert DEFAULT_PLUGINS_GROUP == "vllm.general_plugins"


def test_whether_there_is_an_option(vllm: ReleasedVllm, release: Release) -> None:
    text = (vllm.root / "vllm/engine/arg_utils.py").read_text(encoding="utf-8")
    assert ("--sleep-mode-backend" in text) is release.has_option


def test_the_fields_of_the_configuration(vllm: ReleasedVllm, release: Release) -> None:
    fields = {
        node.target.id: node.value
        for node in vllm.class_tree("vllm/config/model.py", "ModelConfig").body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    default = fields["sleep_mode_backend"]
    assert isinstance(default, ast.Constant)
    assert default.value == VLLM_OWN
    assert "enable_sleep_mode" in fields
    assert ("sleep_mode_offload_cudagraph" in fields) is release.has_option


def test_the_calls_of_a_worker(vllm: ReleasedVllm) -> None:
    worker = public(vllm.class_tree(WORKER, "Worker"))
    assert names(worker["sleep"]) == ["level"]
    assert names(worker["wake_up"]) == ["tags"]
    assert names(worker["init_device"]) == []
    assert {"compile_or_warm_up_model", "load_model", "reload_weights", "shutdown"} <= set(worker)
    assert not [name for name in worker if name.startswith(PLUGIN)]
    if "discard" in worker:
        assert names(worker["discard"]) == ["tags"]
    executor = public(vllm.class_tree("vllm/v1/executor/abstract.py", "Executor"))
    assert ("discard" in executor) is ("discard" in worker)


def test_the_calls_of_an_engine(vllm: ReleasedVllm) -> None:
    llm = public(vllm.class_tree("vllm/entrypoints/llm.py", "LLM"))
    assert names(llm["sleep"])[0] == "level"
    assert names(llm["wake_up"]) == ["tags"]
    assert names(llm["collective_rpc"]) == ["method", "timeout", "args", "kwargs"]
    assert "reset_prefix_cache" in llm
    worker = public(vllm.class_tree(WORKER, "Worker"))
    assert ("release_kv_cache_memory" in llm) is ("discard" in worker)


def test_a_call_that_a_worker_lacks_fails(vllm: ReleasedVllm) -> None:
    """That is how an engine without ours is recognised before anything changes."""
    run: Any = vllm.function("vllm/v1/serial_utils.py", "run_method")
    assert run(SimpleNamespace(there=str.upper), "there", ("a",), {}) == "A"
    with pytest.raises(Exception, match="sleepbackends_status"):
        run(object(), "sleepbackends_status", (), {})


@pytest.mark.parametrize("method", ["there", "sleepbackends_status"])
def test_also_in_a_worker_process(vllm: ReleasedVllm, method: str) -> None:
    class Stopped(BaseException): ...

    class Requests:
        requests: Iterator[tuple[Any, ...]] = iter([(method, ("a",), {}, None)])

        def dequeue(self, indefinite: bool) -> tuple[Any, ...]:
            for request in self.requests:
                return request
            raise Stopped

    answers: list[object] = []
    watchdog = SimpleNamespace(disable=nullcontext, feed=lambda: None)
    file, owner = "vllm/v1/executor/multiproc_executor.py", "WorkerProc"
    further = {"_execute_worker_rpc"} & set(methods(vllm, file, owner))
    process: Any = vllm.part(
        file,
        owner,
        {"worker_busy_loop"} | further,
        get_watch_dog=lambda: watchdog,
        logger=logging.getLogger("vllm"),
        traceback=traceback,
    )()
    process.rpc_broadcast_mq = Requests()
    process.worker = SimpleNamespace(there=str.upper)
    process.handle_output = answers.append
    with pytest.raises(Stopped):
        process.worker_busy_loop()
    (answer,) = answers
    assert answer == "A" if method == "there" else isinstance(answer, Exception)


def tags_of_pools(vllm: ReleasedVllm) -> Iterator[str]:
    """Every literal tag that memory is allocated under."""
    files = [WORKER, ALLOCATOR, "vllm/v1/worker/lora_model_runner_mixin.py"]
    for file in files:
        if not (vllm.root / file).exists():
            continue
        for node in ast.walk(vllm.tree(file)):
            if not isinstance(node, ast.Call):
                continue
            called = getattr(node.func, "attr", "")
            if called in ("use_memory_pool", "_maybe_get_memory_pool_context"):
                given = [*node.args, *(keyword.value for keyword in node.keywords)]
                yield from (str(each.value) for each in given if isinstance(each, ast.Constant))
    if CUDA_GRAPHS in (vllm.root / ALLOCATOR).read_text(encoding="utf-8"):
        yield CUDA_GRAPHS


def test_the_tags_are_known(vllm: ReleasedVllm) -> None:
    found = set(tags_of_pools(vllm))
    assert set(DEFERRABLE) <= found <= TAGS


def test_our_policies_keep_and_drop_what_vllm_does(
    vllm: ReleasedVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    class Recorder:
        kept: tuple[str, ...] = ()

        def sleep(self, offload_tags: tuple[str, ...]) -> None:
            self.kept = offload_tags

    recorder = Recorder()
    monkeypatch.setattr(CuMemAllocator, "instance", recorder)
    policies = configuration(PLUGIN, {}).tag_policies
    for level in (1, 2):
        CuMemBackend().suspend(level)
        for tag in set(tags_of_pools(vllm)):
            expected = Policy.OFFLOAD if tag in recorder.kept else Policy.DISCARD
            assert policies.at(tag, level) is expected, (tag, level)


@pytest.mark.parametrize("version", WITH_OPTION, indirect=True)
def test_what_a_wake_up_may_leave_asleep(vllm: ReleasedVllm) -> None:
    from vllm.device_allocator import DEFERRABLE_TAGS

    assert DEFERRABLE_TAGS == DEFERRABLE


def test_when_saved_buffers_are_copied_back(vllm: ReleasedVllm, release: Release) -> None:
    copied: list[object] = []

    class Backend:
        def resume(self, tags: object) -> None: ...

    class Buffer:
        data = property(lambda self: self)
        copy_ = staticmethod(copied.append)

    class Model:
        def named_buffers(self) -> list[tuple[str, Buffer]]:
            return [("buffer", Buffer())]

        def post_kv_cache_wake_up(self) -> None: ...

    worker: Any = vllm.part(WORKER, "Worker", {"wake_up"}, **vllm.worker_names())()
    runner: Any = Model()
    runner.model = Model()
    worker.model_runner = runner
    worker.sleep_mode_backend = Backend()
    worker._get_sleep_mode_backend = Backend
    worker.vllm_config = type("C", (), {"model_config": type("M", (), {})})
    worker.vllm_config.model_config.enable_nccl_comm_suspend = False
    worker._sleep_saved_parameters, worker._sleep_saved_draft_buffers = {}, {}
    worker._sleep_rebuild_draft_metadata_buffers = False
    worker._sleep_saved_buffers = {"buffer": Buffer()}
    worker.synchronize_device = lambda: None
    worker.wake_up(["kv_cache"])
    assert bool(copied) is release.restores_buffers_on_any_wake
    worker.wake_up(["weights"])
    assert copied


def test_the_table_is_in_the_documentation(version: str) -> None:
    if version in SUPPORTED:
        from tests.test_docs import DOCS

        assert f"| {version} |" in (DOCS / "with-vllm.md").read_text(encoding="utf-8")
