"""What the tests of the torch_memory_saver interface share: raw memory instead of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from sleepbackends.adapters.torch_memory_saver import TorchMemorySaver
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.settings import BackendSettings
from sleepbackends.state import BackendState
from sleepbackends.vmm.region import DeviceMemory
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.cuda import Simulator

SIZE_BYTES = 3 * GRANULE_BYTES

MakeSaver = Callable[..., TorchMemorySaver]


@pytest.fixture
def make_saver(simulator: Simulator) -> Iterator[MakeSaver]:
    made = []

    def make(settings: BackendSettings | None = None, **options: object) -> TorchMemorySaver:
        chosen = CumemOptions.model_validate(options) if options else None
        made.append(TorchMemorySaver(chosen, settings))
        return made[-1]

    yield make
    for saver in made:
        if saver._backend is not None:
            saver._backend.close()
    assert simulator.process_usage().pinned_bytes == 0


@pytest.fixture
def saver(make_saver: MakeSaver) -> TorchMemorySaver:
    return make_saver()


def filled(
    saver: TorchMemorySaver, byte: int, size_bytes: int = SIZE_BYTES, **region: Any
) -> DeviceMemory:
    """Memory of a region, without torch."""
    with saver.region(**region) as opened:
        memory = opened.buffer(size_bytes)
    memory.write(bytes([byte]) * size_bytes)
    return memory


def holds(memory: DeviceMemory, byte: int) -> bool:
    return memory.read() == bytes([byte]) * memory.size_bytes


def resident(simulator: Simulator, device: int = 0) -> int:
    """How often the device holds ``SIZE_BYTES``; what a backend keeps for itself is less."""
    return simulator.device_usage(device).used_bytes // SIZE_BYTES


def state(saver: TorchMemorySaver) -> BackendState:
    return saver.backend.state()


@dataclass
class OnDevice:
    """As much of a CUDA tensor as there can be without one."""

    address: int
    like: torch.Tensor
    is_cuda: bool = True

    def data_ptr(self) -> int:
        return self.address

    def is_contiguous(self) -> bool:
        return self.like.is_contiguous()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.like, name)


def on_device(
    saver: TorchMemorySaver, contents: torch.Tensor, offset: int = 0, **region: Any
) -> torch.Tensor:
    """Put contents into memory of a region, some bytes from its beginning."""
    data = bytes(offset) + contents.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    with saver.region(**region) as opened:
        memory = opened.buffer(len(data))
    memory.write(data)
    return cast("torch.Tensor", OnDevice(memory.address + offset, contents))
