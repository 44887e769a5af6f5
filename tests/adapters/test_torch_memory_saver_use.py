"""Saved contents, graphs, what is refused, laziness, other processes."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import sleepbackends.adapters.torch_memory_saver as module
from sleepbackends.adapters.torch_memory_saver import TorchMemorySaver, configure_subprocess
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.errors import PolicyConflictError, RequestError, UnsupportedOperationError
from sleepbackends.mechanism import Fill
from sleepbackends.settings import BackendSettings
from tests.adapters.tms import (
    MakeSaver,
    OnDevice,
    filled,
    holds,
    make_saver,
    on_device,
    saver,
    state,
)
from tests.native.fixtures import kernel_images, native_library, simulator

__all__ = ["kernel_images", "make_saver", "native_library", "saver", "simulator"]

TENSORS = [
    torch.arange(600, dtype=torch.float32).view(10, 20, 3),
    torch.arange(-40, 40, dtype=torch.bfloat16).view(2, 40),
    torch.tensor(7, dtype=torch.int64),
    torch.tensor([True, False, True]),
]

# Contents


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("contents", TENSORS, ids=lambda t: str(t.dtype))
def test_saved_contents_can_be_read(
    saver: TorchMemorySaver, contents: torch.Tensor, zero_copy: bool
) -> None:
    tensor = on_device(saver, contents, offset=16, tag="weights", enable_cpu_backup=True)
    filled(saver, 3, enable_cpu_backup=True)
    assert saver.get_cpu_backup(tensor) is None, "awake: the tensor has its contents"
    saver.pause("weights")
    saved = saver.get_cpu_backup(tensor, zero_copy=zero_copy)
    assert saved is not None
    assert (saved.device.type, saved.dtype, saved.shape) == ("cpu", contents.dtype, contents.shape)
    assert saved.is_contiguous()
    assert torch.equal(saved, contents)
    saver.resume("weights")
    assert saver.get_cpu_backup(tensor) is None
    if not zero_copy:
        assert torch.equal(saved, contents), "a copy outlives the resume"


def test_a_copy_is_the_caller_s_to_change(saver: TorchMemorySaver) -> None:
    tensor = on_device(saver, TENSORS[0], enable_cpu_backup=True)
    saver.pause()
    saved = saver.get_cpu_backup(tensor)
    assert saved is not None
    saved.zero_()
    again = saver.get_cpu_backup(tensor)
    assert again is not None
    assert torch.equal(again, TENSORS[0])


def test_without_copying_it_is_the_same_memory_each_time(saver: TorchMemorySaver) -> None:
    tensor = on_device(saver, TENSORS[0], enable_cpu_backup=True)
    saver.pause()
    one, two = (saver.get_cpu_backup(tensor, zero_copy=True) for _ in range(2))
    assert one is not None
    assert two is not None
    assert one.data_ptr() == two.data_ptr()


def test_contents_that_are_gone_are_an_error(saver: TorchMemorySaver) -> None:
    """None would send the caller to memory that is not there."""
    tensor = on_device(saver, TENSORS[0])
    saver.pause()
    with pytest.raises(PolicyConflictError, match="gone") as caught:
        saver.get_cpu_backup(tensor)
    assert "enable_cpu_backup" in caught.value.hint


def test_a_tensor_of_others_has_its_contents(saver: TorchMemorySaver) -> None:
    elsewhere: Any = OnDevice(0x1000, TENSORS[0])
    memory = filled(saver, 1, enable_cpu_backup=True)
    nothing: list[Any] = [OnDevice(at, torch.empty(0)) for at in (0, memory.address)]
    saver.pause()
    assert [saver.get_cpu_backup(tensor) for tensor in (elsewhere, *nothing)] == [None] * 3


def test_only_contiguous_tensors_on_a_device_can_be_asked_for(saver: TorchMemorySaver) -> None:
    strided: Any = OnDevice(0x1000, TENSORS[0].transpose(0, 1))
    for tensor, why in ((TENSORS[0], "cpu"), (strided, "strided")):
        with pytest.raises(RequestError, match=why):
            saver.get_cpu_backup(tensor)


def test_settings_are_the_backend_s(make_saver: MakeSaver) -> None:
    saver = make_saver(BackendSettings(fill=Fill.POISON), share_below_bytes=0)
    memory = filled(saver, 1)
    filled(saver, 1)
    assert state(saver).tags["discard:default"].blocks == 2
    saver.pause()
    saver.resume()
    assert holds(memory, 0xA5)


# What is refused


@pytest.mark.parametrize(
    ("arguments", "error", "why"),
    [
        ({"enable_disk_backup": True}, UnsupportedOperationError, "not supported"),
        ({"enable_disk_backup": True, "enable_cpu_backup": True}, RequestError, "exclude"),
        ({"cpu_backup_backend": "mmap"}, RequestError, "no CPU backup"),
        ({"cpu_backup_backend": "disk", "enable_cpu_backup": True}, RequestError, "'disk'"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_before_anything_happens(
    saver: TorchMemorySaver, arguments: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why), saver.region(**arguments):
        pytest.fail("the region was opened")
    assert saver._backend is None


@pytest.mark.parametrize("kind", ["pinned", "mmap"])
def test_either_kind_of_backup_is_the_same(saver: TorchMemorySaver, kind: Any) -> None:
    memory = filled(saver, 1, enable_cpu_backup=True, cpu_backup_backend=kind)
    saver.pause()
    saver.resume()
    assert holds(memory, 1)


def test_there_is_no_disk(saver: TorchMemorySaver) -> None:
    with pytest.raises(UnsupportedOperationError, match="'somewhere'"):
        saver.set_disk_backup_dir("somewhere")


def test_hook_modes_are_known_and_make_no_difference(saver: TorchMemorySaver) -> None:
    for mode in ("torch", "preload"):
        saver.hook_mode = mode
        assert saver.hook_mode == mode
        filled(saver, 1)
    with pytest.raises(RequestError, match="'mine'"):
        saver.hook_mode = "mine"  # type: ignore[assignment]
    assert saver.hook_mode == "preload"


# Graphs, and memory of torch's own


def test_graphs_need_torch_with_cuda(saver: TorchMemorySaver) -> None:
    graph: Any = object()
    with pytest.raises(UnsupportedOperationError, match="torch"), saver.cuda_graph(graph):
        pytest.fail("a capture began")


class Recorder:
    """A backend and a torch that only remember what they were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any, dict[str, Any]]] = []

    @contextlib.contextmanager
    def graph_pool(self, tag: str, **arguments: Any) -> Iterator[tuple[int, int]]:
        self.asked.append(("graph_pool", tag, arguments))
        yield (0, 99)

    @contextlib.contextmanager
    def graph(self, graph: object, **arguments: Any) -> Iterator[None]:
        self.asked.append(("graph", graph, arguments))
        yield

    def close(self) -> None:
        pass


@pytest.fixture
def recorder(saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder: Any = Recorder()
    saver._backend = recorder
    monkeypatch.setattr(torch.cuda, "graph", recorder.graph)
    return recorder  # type: ignore[no-any-return]


def test_a_capture_gets_a_pool_that_stands_for_the_caller_s(
    saver: TorchMemorySaver, recorder: Recorder
) -> None:
    graph: Any = object()
    stream: Any = object()
    with saver.cuda_graph(
        cuda_graph=graph, pool=(0, 7), stream=stream, capture_error_mode="relaxed", tag="graphs"
    ):
        pass
    pool, capture = recorder.asked
    assert pool == ("graph_pool", "discard:graphs", {"shared_as": (0, 7)})
    expected = {"pool": (0, 99), "stream": stream, "capture_error_mode": "relaxed"}
    assert capture == ("graph", graph, expected)


def test_a_graph_s_memory_may_have_a_backup(saver: TorchMemorySaver, recorder: Recorder) -> None:
    graph: Any = object()
    with saver.cuda_graph(graph, enable_cpu_backup=True):
        pass
    assert recorder.asked[0] == ("graph_pool", "offload:default", {"shared_as": None})
    assert recorder.asked[1][2]["capture_error_mode"] == "global"


def test_disable_is_possible_anywhere(saver: TorchMemorySaver) -> None:
    with saver.disable():
        memory = filled(saver, 1)
    with saver.region(), saver.disable():
        pass
    assert holds(memory, 1)


# Other processes


def test_configuring_a_subprocess_changes_nothing() -> None:
    environment = dict(os.environ)
    with configure_subprocess():
        assert dict(os.environ) == environment


def test_one_that_was_not_used_can_be_copied_and_pickled() -> None:
    saver = TorchMemorySaver(CumemOptions(verify="resume"))
    saver.memory_margin_bytes = 5
    saver.retain_cpu_backup = True
    for other in (pickle.loads(pickle.dumps(saver)), copy.copy(saver)):
        assert other is not saver
        assert (other.memory_margin_bytes, other.retain_cpu_backup) == (5, True)
        assert other._options == saver._options
        assert other._lock.acquire(blocking=False)


def test_one_that_holds_memory_cannot_be_pickled(saver: TorchMemorySaver) -> None:
    memory = filled(saver, 1)
    with pytest.raises(UnsupportedOperationError, match="pickled"):
        pickle.dumps(saver)
    assert holds(memory, 1)


LAZY = """
import json, pickle, sys
from sleepbackends.adapters import torch_memory_saver as module
from sleepbackends.adapters.torch_memory_saver import configure_subprocess, torch_memory_saver
torch_memory_saver.hook_mode = "torch"
torch_memory_saver.memory_margin_bytes = 1 << 30
torch_memory_saver.retain_cpu_backup = True
torch_memory_saver.enabled
pickle.dumps(torch_memory_saver)
with configure_subprocess():
    module.TorchMemorySaver()
print(json.dumps(sorted(sys.modules)))
"""


def test_nothing_is_loaded_before_the_first_use() -> None:
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert not {"torch", "numpy", "cuda", "pydantic"} & loaded
    assert not any(name.startswith("sleepbackends.cumem") for name in loaded)


def test_it_can_stand_in_for_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an engine whose imports cannot be changed."""
    monkeypatch.setitem(sys.modules, "torch_memory_saver", module)
    names: dict[str, Any] = {}
    exec(  # noqa: S102 - as an engine does it
        "import torch_memory_saver\n"
        "from torch_memory_saver import configure_subprocess, torch_memory_saver as saver",
        names,
    )
    assert names["saver"] is names["torch_memory_saver"].torch_memory_saver
    assert isinstance(names["saver"], names["torch_memory_saver"].TorchMemorySaver)
    assert names["configure_subprocess"] is configure_subprocess
