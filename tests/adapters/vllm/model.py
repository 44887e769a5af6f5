"""A model of a few tensors, its runner, and the memory they are in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sleepbackends.adapters.vllm.allocator import Allocator, installed
from sleepbackends.adapters.vllm.memory import Memory
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.pool_torch import PoolTorch, Tensor

WEIGHTS_BYTES = 4 * GRANULE_BYTES
KV_BYTES = 8 * GRANULE_BYTES
SMALL_BYTES = GRANULE_BYTES


class Buffer:
    """A buffer of a module, in device memory: touched while it is asleep, it raises."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def data(self) -> Buffer:
        return self

    def read(self) -> bytes:
        return memory().read(self.tensor)

    def cpu(self) -> Saved:
        return Saved(self.read())

    def copy_(self, saved: Saved) -> None:
        write(self.tensor, saved.content)


class Saved:
    """What a buffer held."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    @property
    def data(self) -> Saved:
        return self

    def clone(self) -> Saved:
        return self


class Model:
    """Weights and one buffer among them."""

    def __init__(self, torch: PoolTorch) -> None:
        self.weight = torch.empty(WEIGHTS_BYTES)
        self.buffer = Buffer(torch.empty(SMALL_BYTES))
        self.fill()

    def fill(self) -> None:
        write(self.weight, bytes([7]) * WEIGHTS_BYTES)
        write(self.buffer.tensor, bytes([9]) * SMALL_BYTES)

    def named_buffers(self) -> list[tuple[str, Buffer]]:
        return [("buffer", self.buffer)]

    def named_parameters(self) -> list[tuple[str, object]]:
        return []

    def is_right(self) -> bool:
        weights = read(self.weight) == bytes([7]) * WEIGHTS_BYTES
        return weights and self.buffer.read() == bytes([9]) * SMALL_BYTES


class Runner:
    """A model runner that allocates what vLLM's do, under the same tags."""

    def __init__(self, torch: PoolTorch) -> None:
        self.torch = torch
        self.model: Model | None = None
        self.kv_cache: Tensor | None = None
        self.runtime: Tensor | None = None
        self.woken = 0

    def load_model(self, load_dummy_weights: bool = False) -> None:
        self.model = Model(self.torch)

    def initialize_kv_cache(
        self, config: object, kv_cache_allocation_context: AbstractContextManager[Any] | None = None
    ) -> None:
        with kv_cache_allocation_context or nullcontext():
            self.kv_cache = self.torch.empty(KV_BYTES)
        if kv_cache_allocation_context is not None:
            self.runtime = self.torch.empty(SMALL_BYTES)
            write(self.runtime, bytes([3]) * SMALL_BYTES)

    def post_kv_cache_wake_up(self) -> None:
        self.woken += 1

    def shutdown(self) -> None:
        self.model = self.kv_cache = self.runtime = None


class _Memory:
    """The memory of the worker of this process."""

    def __init__(self, ours: Memory) -> None:
        self.ours = ours
        self.backend: Any = ours.orchestrator.backend

    def read(self, tensor: Tensor) -> bytes:
        content: bytes = self.backend.cuda.read(tensor.address, tensor.size_bytes, 0)
        return content

    @property
    def asleep(self) -> frozenset[str]:
        asleep: frozenset[str] = self.backend.state().asleep_tags()
        return asleep


def memory() -> _Memory:
    """Return the memory of this process's worker."""
    allocator: Allocator | None = installed()
    assert allocator is not None, "vLLM's allocator is its own"
    return _Memory(allocator.memory)


def read(tensor: Tensor) -> bytes:
    """Return a tensor's bytes; fails while it is asleep."""
    return memory().read(tensor)


def write(tensor: Tensor, content: bytes) -> None:
    """Overwrite a tensor's bytes; fails while it is asleep."""
    memory().backend.cuda.write(tensor.address, content, 0)
