from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sleepbackends.errors import HostMemoryError, RequestError
from sleepbackends.host_limits import HostMemory
from sleepbackends.hostmemory import backend as backend_module
from sleepbackends.hostmemory import driver
from sleepbackends.hostmemory.backend import HostMemoryBackend
from sleepbackends.tensors import moving as moving_module

from .conftest import InMemory, count_blocks


def owned(backend: InMemory, tensor: torch.Tensor, tag: str = "weights") -> bool:
    block = backend.ledger.containing(tensor.data_ptr())
    return block is not None and block.tag == tag


def sleep_and_wake(backend: InMemory) -> None:
    assert backend.suspend().changed
    assert backend.resume().changed


class Tied(nn.Module):
    """Tied weights, buffers of every sort, a view kept as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("positions", torch.arange(6).expand(1, -1), persistent=False)
        self.first_row = self.embed.weight.detach()[0]
        self.unrelated = torch.ones(3)


def test_a_module_moves_whole_and_stays_itself(backend: InMemory) -> None:
    module = Tied()
    identities = {name: id(p) for name, p in module.named_parameters()}
    want = {name: value.clone() for name, value in module.state_dict().items()}
    assert backend.adopt(module, "weights") is module
    assert {name: id(p) for name, p in module.named_parameters()} == identities
    assert all(p.requires_grad and p.is_leaf for p in module.parameters())
    assert module.head.weight is module.embed.weight
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        assert owned(backend, value), name
    assert not owned(backend, module.unrelated)
    # One block for each storage: embedding, bias, norm (5), positions.
    assert count_blocks(backend) == 1 + 1 + 5 + 1
    sleep_and_wake(backend)
    assert all(torch.equal(module.state_dict()[name], value) for name, value in want.items())
    assert module.positions.tolist() == [[0, 1, 2, 3, 4, 5]]
    with torch.no_grad():
        module.head.weight[0] = 9
    assert module.first_row.tolist() == [9] * 4


def test_training_goes_on_after_adoption(backend: InMemory) -> None:
    torch.manual_seed(0)
    plain, moved = nn.Linear(3, 2), nn.Linear(3, 2)
    moved.load_state_dict(plain.state_dict())
    data = torch.randn(5, 3)
    for number, module in enumerate((plain, moved)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            module(data).square().sum().backward()
            optimizer.step()
            if number:
                backend.adopt(module, "weights")
                assert owned(backend, module.weight.grad)  # type: ignore[arg-type]
                sleep_and_wake(backend)
    assert torch.equal(plain.weight, moved.weight)
    assert torch.equal(plain.weight.grad, moved.weight.grad)  # type: ignore[arg-type]


def test_a_graph_recorded_before_can_still_run_backward(backend: InMemory) -> None:
    weight = nn.Parameter(torch.tensor([2.0, 3.0]))
    loss = (weight * weight).sum()
    backend.adopt(weight, "weights")
    sleep_and_wake(backend)
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0, 6.0]


def test_bits_survive_whatever_they_mean(backend: InMemory) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    tensor = bits.clone().view(torch.bfloat16).detach().clone()
    assert tensor.isnan().sum() > 200
    backend.adopt(tensor, "weights")
    sleep_and_wake(backend)
    assert torch.equal(tensor.view(torch.int16), bits)


def test_old_memory_is_given_up_and_new_memory_lives_as_long_as_a_view(backend: InMemory) -> None:
    tensor = torch.ones(100)
    old = weakref.ref(tensor.untyped_storage())
    backend.adopt(tensor, "weights")
    assert old() is None
    view = tensor[5:]
    del tensor
    assert count_blocks(backend) == 1
    del view
    assert count_blocks(backend) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        lambda: torch.arange(10.0)[::3].detach(),
        lambda: torch.arange(5.0).expand(3, 5),
        lambda: torch.tensor(3.0),
        lambda: torch.randn(4, dtype=torch.complex64).conj(),
        lambda: torch.randn(4, dtype=torch.complex64).conj().imag.detach(),
        lambda: torch.arange(100, dtype=torch.uint8)[8:16].detach().view(torch.int64).detach(),
        lambda: torch.from_numpy(np.arange(7)),
        lambda: torch.arange(6.0).requires_grad_() * 2,
    ],
)
def test_layout_and_values_stay(backend: InMemory, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    want, stride = tensor.detach().clone(), tensor.stride()
    backend.adopt(tensor, "weights")
    assert owned(backend, tensor)
    sleep_and_wake(backend)
    assert tensor.stride() == stride
    assert torch.equal(tensor, want)


def test_inference_tensors_stay_inference_tensors(backend: InMemory) -> None:
    with torch.inference_mode():
        made = torch.arange(3.0)
        module = nn.Linear(2, 2)
    backend.adopt([made, module], "weights")
    assert made.is_inference()
    assert owned(backend, made)
    normal = torch.ones(2)
    with torch.inference_mode():
        backend.adopt(normal, "weights")
    assert not normal.is_inference()


def test_a_block_covers_what_is_used_and_no_more(backend: InMemory) -> None:
    slice_ = torch.zeros(100_000)[50_000:50_100].detach()
    slice_ += torch.arange(100.0)
    backend.adopt(slice_, "weights")
    assert 400 <= backend.state().tags["weights"].resident_bytes < 400 + 64
    assert torch.equal(slice_, torch.arange(100.0))


def test_two_storages_over_the_same_bytes_stay_one(backend: InMemory) -> None:
    array = np.arange(10.0)
    first, second = torch.from_numpy(array)[:6], torch.from_numpy(array[4:])
    backend.adopt([first.detach(), first, first._base, second], "weights")
    assert count_blocks(backend) == 1
    first[5] = 70
    assert second[1] == 70


def test_a_storage_inside_another_one_joins_it(backend: InMemory) -> None:
    array = np.arange(10.0)
    whole, inner = torch.from_numpy(array), torch.from_numpy(array[2:4])
    backend.adopt([whole, inner], "weights")
    inner[0] = 20
    assert whole.tolist() == [0, 1, 20, 3, 4, 5, 6, 7, 8, 9]


def test_overlap_that_no_tensor_can_express_is_refused(backend: InMemory) -> None:
    raw = np.arange(40, dtype="u1")
    first, second = (torch.from_numpy(raw[n : n + 16].view("i4")) for n in (0, 2))
    with pytest.raises(RequestError, match="without being aligned"):
        backend.adopt([first, second], "weights")
    assert count_blocks(backend) == 0


def test_a_block_starts_where_every_dtype_in_it_is_aligned(backend: InMemory) -> None:
    base = torch.arange(100, dtype=torch.int32)
    low, high = base[1:3].detach(), base.view(torch.int64)[1:3].detach()
    del base
    backend.adopt([low, high], "weights")
    low[1] = 77
    assert high[0] == 77 + (3 << 32)
    assert low.data_ptr() % 64 == 4


def test_repeating_does_nothing_and_another_tag_is_refused(backend: InMemory) -> None:
    module = nn.Linear(3, 3)
    backend.adopt(module, "weights")
    before = [p.data_ptr() for p in module.parameters()]
    backend.adopt(module, "weights")
    backend.adopt([module.weight, module], "weights")
    assert [p.data_ptr() for p in module.parameters()] == before
    with pytest.raises(RequestError, match=r"weight .*'weights'.*'other'"):
        backend.adopt(module, "other")
    assert "other" not in backend.state().tags
    backend.suspend()
    backend.adopt(module, "weights")


def test_tensors_of_a_region_belong_already(backend: InMemory) -> None:
    with backend.region("weights") as region:
        tensor = region.empty((4, 4), torch.float32)
    address = tensor.data_ptr()
    backend.adopt(nn.Parameter(tensor[1:]), "weights")
    assert (tensor.data_ptr(), count_blocks(backend)) == (address, 1)


def test_nothing_to_move_is_no_error(backend: InMemory) -> None:
    empty = torch.empty(0, 3)
    backend.adopt([empty, torch.zeros(5)[0:0].detach(), nn.Identity()], "weights")
    assert count_blocks(backend) == 0


def test_elementless_views_move_along(backend: InMemory) -> None:
    base = torch.ones(500)
    some, nothing = base[400:450].detach(), base[0:0].detach()
    old = weakref.ref(base.untyped_storage())
    del base
    backend.adopt([nothing, some], "weights")
    assert owned(backend, some)
    assert nothing.shape == (0,)
    assert old() is None


class Subclass(nn.Parameter):
    """A parameter class of an engine: ordinary memory, extra behaviour."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("adoption must not go through the subclass")


def test_subclasses_with_ordinary_memory_move(backend: InMemory) -> None:
    parameter = Subclass(torch.arange(3.0))
    backend.adopt(parameter, "weights")
    assert type(parameter) is Subclass
    assert backend.state().tags["weights"].blocks == 1


def test_out_of_room_half_way_changes_nothing(
    backend: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Linear(3, 3)
    before = [p.data_ptr() for p in module.parameters()]
    map_memory, left = driver.map_memory, iter([True, False])

    def map_one(address: int, size_bytes: int) -> None:
        if not next(left):
            raise HostMemoryError("no more")
        map_memory(address, size_bytes)

    monkeypatch.setattr(driver, "map_memory", map_one)
    with pytest.raises(HostMemoryError, match="no more") as caught:
        backend.adopt(module, "weights")
    # Also while the error, and with it the frames it passed, is still referred to.
    assert count_blocks(backend) == 0
    assert [p.data_ptr() for p in module.parameters()] == before
    assert caught.value.operation == "allocate"


def test_room_for_everything_is_checked_first(
    backend: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "host_memory", lambda: HostMemory(8191, None, "a test"))
    monkeypatch.setattr(backend, "allocate", pytest.fail)
    with pytest.raises(HostMemoryError) as caught:
        backend.adopt(nn.Linear(3, 3), "weights")
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (8192, 8191)
    assert "weights" not in backend.state().tags


def test_a_failure_while_swapping_puts_everything_back(
    backend: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Linear(3, 3)
    before = [p.data_ptr() for p in module.parameters()]
    alias, calls = moving_module._alias, iter([True, False])

    def fail_second(*args: Any) -> Any:
        if next(calls):
            return alias(*args)
        raise RuntimeError("torch refuses")

    monkeypatch.setattr(moving_module, "_alias", fail_second)
    with pytest.raises(RuntimeError, match="torch refuses"):
        backend.adopt(module, "weights")
    assert [p.data_ptr() for p in module.parameters()] == before
    monkeypatch.undo()
    assert count_blocks(backend) == 0
    module(torch.ones(3)).sum().backward()


def test_a_suspend_between_copy_and_swap_does_no_harm(
    backend: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = HostMemoryBackend.allocate

    def allocate_then_suspend(self: InMemory, *args: Any) -> Any:
        buffer = allocate(self, *args)
        self.suspend()
        return buffer

    monkeypatch.setattr(HostMemoryBackend, "allocate", allocate_then_suspend)
    tensor = torch.arange(4.0)
    backend.adopt(tensor, "weights")
    backend.resume()
    assert tensor.tolist() == [0, 1, 2, 3]
    [block] = backend.ledger.blocks()
    assert driver.round_up(block.size_bytes) >= 16
