"""How adoption moves tensors, with tensors of the host in the place of the device's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sleepbackends.cumem.accelerator import CUDA
from sleepbackends.errors import (
    ClosedError,
    DeviceMemoryError,
    RequestError,
    UnsupportedOperationError,
)
from sleepbackends.lock import TransitionLock
from sleepbackends.tensors import finding
from sleepbackends.vmm import adopt as adopt_module
from sleepbackends.vmm.accelerator import Accelerator
from sleepbackends.vmm.adopt import adopt


class Recorder:
    """What adoption asks of a backend and its address space, and what it did."""

    def __init__(self) -> None:
        self._lock = TransitionLock()
        self.accelerator = CUDA
        self.driver = SimpleNamespace(free_bytes=lambda device: 7)
        self.log: list[object] = []
        self.owned: list[Any] = []
        self.closed = False

    def open_tag(self, tag: str) -> str:
        self.log.append(("open", tag))
        return tag

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("closed")

    @contextmanager
    def region(self, tag: str, device: int) -> Iterator[None]:
        assert self._lock.current is not None, "a suspend could come in between"
        self.log.append(("region", tag, device))
        yield

    def extents(self) -> list[Any]:
        return self.owned


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(Accelerator, "import_torch", lambda _: torch)
    monkeypatch.setattr(
        adopt_module, "passed", lambda t, target, _: finding.passed(t, target, "cpu")
    )
    monkeypatch.setattr(adopt_module, "_device_index", lambda span: 0)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: recorder.log.append(name))
    return recorder


def run(recorder: Recorder, target: Any, tag: str = "weights") -> Any:
    backend: Any = recorder
    return adopt(backend, backend, target, tag)


def addresses(module: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in module.parameters()]


def test_a_module_moves_inside_a_region_and_stays_itself(recorder: Recorder) -> None:
    module = nn.Linear(5, 3)
    module.row = module.weight.detach()[1:]
    want = {name: value.clone() for name, value in module.state_dict().items()}
    before = addresses(module)
    assert run(recorder, module) is module
    assert not set(addresses(module)) & set(before)
    assert all(torch.equal(module.state_dict()[name], value) for name, value in want.items())
    with torch.no_grad():
        module.weight[1] = 9
    assert module.row[0].tolist() == [9] * 5
    assert recorder.log == [
        ("open", "weights"),
        "synchronize",
        ("region", "weights", 0),
        "synchronize",
    ]


def test_storages_over_the_same_bytes_become_one(recorder: Recorder) -> None:
    array = np.arange(40, dtype="i4")
    first, second = torch.from_numpy(array[:24]), torch.from_numpy(array[16:])
    run(recorder, [first, second])
    assert first.tolist() == list(range(24))
    assert second.tolist() == list(range(16, 40))
    first[20] = 77
    assert second[4] == 77
    assert array[20] == 20


def test_without_room_nothing_changes(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(5, 3)
    before = addresses(module)
    copied, left = adopt_module._copied, iter([True, False])

    def copy_one(*args: Any) -> Any:
        if next(left):
            return copied(*args)
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(adopt_module, "_copied", copy_one)
    with pytest.raises(DeviceMemoryError, match="second copy") as caught:
        run(recorder, module)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (72, 7)
    assert addresses(module) == before
    assert recorder.log[-1] == "empty_cache"
    assert recorder._lock.current is None


def test_memory_that_belongs_already_stays(recorder: Recorder) -> None:
    tensor = torch.ones(100)
    address = tensor.data_ptr()
    recorder.owned = [SimpleNamespace(address=address, size_bytes=400, tag="weights")]
    run(recorder, tensor)
    assert tensor.data_ptr() == address
    recorder.log.clear()
    with pytest.raises(RequestError, match="'weights' already and cannot join 'other'"):
        run(recorder, tensor, "other")
    assert recorder.log == []


def test_a_closed_backend_takes_nothing(recorder: Recorder) -> None:
    tensor = torch.ones(3)
    address = tensor.data_ptr()
    recorder.closed = True
    with pytest.raises(ClosedError):
        run(recorder, tensor)
    assert tensor.data_ptr() == address
    assert recorder._lock.current is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a device")
def test_without_a_device_it_says_so() -> None:
    backend: Any = Recorder()
    with pytest.raises(UnsupportedOperationError, match="no CUDA device"):
        adopt(backend, backend, torch.ones(3), "weights")


def test_tensors_of_the_host_are_refused() -> None:
    look = partial(finding.passed, torch, torch.ones(3))
    with pytest.raises(RequestError, match="on device cpu") as caught:
        look("cuda")
    assert "CUDA memory" in caught.value.hint
    assert look("cpu")
