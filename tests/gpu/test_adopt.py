"""An already loaded CUDA module moves into memory of a backend."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.errors import ClosedError, DeviceMemoryError, RequestError

from .helpers import (
    LARGE,
    SLACK,
    blocks,
    drop_caches,
    free_device_bytes,
    holds,
    pattern,
    spin,
    tag_of,
)


class Tied(nn.Module):
    """Tied weights, a buffer, a view kept as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.head = nn.Linear(64, 1000)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(64))
        self.to("cuda")
        self.first_row = self.embed.weight.detach()[0]
        self.unrelated = torch.ones(3, device="cuda")

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.embed(tokens) * self.scale)


@pytest.fixture
def adopting(backend: CumemBackend) -> Any:
    """The backend; the caller's types are what is under test."""
    return backend


def cycle(backend: CumemBackend) -> None:
    assert backend.suspend(1).changed
    assert backend.resume().changed


def test_a_module_moves_whole_and_stays_itself(adopting: Any) -> None:
    module = Tied()
    tokens = torch.arange(50, device="cuda")
    expected = module(tokens).detach()
    identities = {name: id(p) for name, p in module.named_parameters()}
    assert adopting.adopt(module, "weights") is module
    assert {name: id(p) for name, p in module.named_parameters()} == identities
    assert module.head.weight is module.embed.weight
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        assert tag_of(adopting, value) == "weights", name
    assert tag_of(adopting, module.unrelated) is None
    cycle(adopting)
    assert torch.equal(module(tokens), expected)
    with torch.no_grad():
        module.head.weight[0] = 9
    assert module.first_row.tolist() == [9] * 64


def test_training_goes_on(adopting: Any) -> None:
    torch.manual_seed(0)
    plain, moved = nn.Linear(64, 32).cuda(), nn.Linear(64, 32).cuda()
    moved.load_state_dict(plain.state_dict())
    data = torch.randn(16, 64, device="cuda")
    for number, module in enumerate((plain, moved)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            module(data).square().sum().backward()
            optimizer.step()
            if number:
                adopting.adopt(module, "weights")
                assert module.weight.grad is not None
                assert tag_of(adopting, module.weight.grad) == "weights"
                cycle(adopting)
    assert torch.equal(plain.weight, moved.weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24.0, device="cuda").view(2, 3, 4).permute(2, 0, 1),
        lambda: torch.arange(10.0, device="cuda")[::3].detach(),
        lambda: torch.tensor(3.0, device="cuda"),
        lambda: torch.randn(4, dtype=torch.complex64, device="cuda").conj(),
        lambda: torch.arange(1000, device="cuda", dtype=torch.uint8)[8:16].detach(),
        lambda: torch.arange(5.0, device="cuda").expand(3, 5),
    ],
)
def test_layout_and_values_stay(adopting: Any, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    expected, stride, place = tensor.detach().clone(), tensor.stride(), tensor.data_ptr() % 512
    adopting.adopt(tensor, "weights")
    assert tag_of(adopting, tensor) == "weights"
    cycle(adopting)
    assert (tensor.stride(), tensor.data_ptr() % 512) == (stride, place)
    assert torch.equal(tensor, expected)


def test_work_queued_before_counts_and_the_old_memory_is_given_up(adopting: Any) -> None:
    tensor = pattern(4 * LARGE, 1)
    old = weakref.ref(tensor.untyped_storage())
    free = free_device_bytes()
    spin(200_000_000)
    tensor.copy_(pattern(tensor.nbytes, 2))
    adopting.adopt(tensor, "weights")
    assert old() is None
    drop_caches()
    assert abs(free_device_bytes() - free) < SLACK
    assert holds(tensor, 2)
    cycle(adopting)
    assert holds(tensor, 2)


def test_repeating_does_nothing_and_another_tag_is_refused(adopting: Any) -> None:
    module = nn.Linear(64, 64).cuda()
    adopting.adopt(module, "weights")
    before = [p.data_ptr() for p in module.parameters()]
    adopting.adopt(module, "weights")
    assert [p.data_ptr() for p in module.parameters()] == before
    with pytest.raises(RequestError, match=r"weight .*'weights'.*'other'"):
        adopting.adopt(module, "other")
    assert "other" not in adopting.state().tags
    adopting.suspend(1)
    adopting.adopt(module, "weights")


def test_memory_of_a_region_belongs_already(adopting: Any) -> None:
    with adopting.region("weights"):
        tensor = pattern(LARGE, 1)
    address = tensor.data_ptr()
    adopting.adopt(tensor, "weights")
    assert (tensor.data_ptr(), blocks(adopting, "weights")) == (address, 1)


def test_what_cannot_move_is_named_and_nothing_changes(adopting: Any) -> None:
    module = nn.Linear(8, 8).cuda()
    before = [p.data_ptr() for p in module.parameters()]
    with pytest.raises(RequestError, match=r"\[1\] .*on device cpu"):
        adopting.adopt([module, torch.ones(3)], "weights")
    view = module.weight.detach()
    with pytest.raises(RequestError, match=r"weight.* shares its memory with 1 tensor"):
        adopting.adopt(module, "weights")
    del view
    base = torch.ones(100, device="cuda")
    with pytest.raises(RequestError, match="view of a larger tensor"):
        adopting.adopt(base[10:], "weights")
    with pytest.raises(RequestError, match="cannot be a tag"):
        adopting.adopt(module, "two words")
    assert [p.data_ptr() for p in module.parameters()] == before
    assert "weights" not in adopting.state().tags
    adopting.adopt([module, base], "weights")


def test_without_room_for_a_second_copy_nothing_changes(adopting: Any) -> None:
    filler = torch.empty(free_device_bytes() - 6 * LARGE, dtype=torch.uint8, device="cuda")
    tensors = [pattern(LARGE, seed) for seed in range(4)]
    before = [tensor.data_ptr() for tensor in tensors]
    with pytest.raises(DeviceMemoryError) as caught:
        adopting.adopt(tensors, "weights")
    assert caught.value.needed_bytes == 4 * LARGE
    assert caught.value.available_bytes < 4 * LARGE
    assert [tensor.data_ptr() for tensor in tensors] == before
    # Also while the error, and with it the frames it passed, is still referred to.
    assert blocks(adopting, "weights") == 0
    assert all(holds(tensor, seed) for seed, tensor in enumerate(tensors[:1]))
    del filler
    drop_caches()
    adopting.adopt(tensors, "weights")
    cycle(adopting)
    assert all(holds(tensor, seed) for seed, tensor in enumerate(tensors))


def test_a_closed_backend_takes_nothing(adopting: Any) -> None:
    tensor = pattern(1000, 1)
    address = tensor.data_ptr()
    adopting.close()
    with pytest.raises(ClosedError):
        adopting.adopt(tensor, "weights")
    assert tensor.data_ptr() == address
