"""What adopt refuses, and that nothing has changed then; aliasing by property."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sleepbackends.errors import RequestError

from .conftest import InMemory, count_blocks


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


UNMOVABLE: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.ones(3, device="meta"),
    "torch.sparse_coo": lambda: torch.ones(3).to_sparse(),
    "torch._mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
    "a wrapper": fake,
    "shared with other processes": lambda: torch.ones(3).share_memory_(),  # type: ignore[no-untyped-call]
    "not initialized": lambda: nn.LazyLinear(3),
}


@pytest.mark.parametrize("kind", UNMOVABLE)
def test_what_cannot_move_is_named_with_the_reason(backend: InMemory, kind: str) -> None:
    good, bad = torch.ones(3), UNMOVABLE[kind]()
    before = good.data_ptr()
    with pytest.raises(RequestError, match=kind) as caught:
        backend.adopt([good, bad], "weights")
    assert "[1]" in caught.value.message
    assert good.data_ptr() == before
    assert "weights" not in backend.state().tags


@pytest.mark.filterwarnings("ignore")
def test_quantized_and_nested_tensors_are_refused(backend: InMemory) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(RequestError, match="quantized"):
        backend.adopt(quantized, "weights")
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(RequestError, match="not dense"):
        backend.adopt(nested, "weights")


def test_a_tensor_inside_a_function_transform_is_refused(backend: InMemory) -> None:
    def look(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(RequestError, match="without memory"):
            backend.adopt(tensor, "weights")
        return tensor

    torch.func.vmap(look)(torch.ones(2, 3))


@pytest.mark.parametrize("target", [np.zeros(3), {"a": 1}, None, "weights", [1], iter([])])
def test_other_things_are_refused(backend: InMemory, target: Any) -> None:
    with pytest.raises(RequestError, match=r"region\.empty"):
        backend.adopt(target, "weights")


def test_a_sparse_gradient_is_named(backend: InMemory) -> None:
    module = nn.Embedding(4, 2, sparse=True)
    module(torch.tensor([1])).sum().backward()
    with pytest.raises(RequestError, match=r"weight\.grad"):
        backend.adopt(module, "weights")


@pytest.mark.parametrize("part", [slice(0, 5), slice(2, 5), slice(2, 10)])
def test_a_view_needs_the_tensor_it_is_a_view_of(backend: InMemory, part: slice) -> None:
    base = torch.arange(10.0)
    view = base[part]
    before = view.data_ptr()
    with pytest.raises(RequestError, match="view of a larger tensor") as caught:
        backend.adopt(view, "weights")
    assert "base" in caught.value.hint
    assert view.data_ptr() == before
    backend.adopt([view, base], "weights")
    base[part] = 50
    assert view[0] == 50


def test_a_view_of_all_of_a_tensor_takes_it_along(backend: InMemory) -> None:
    base = torch.arange(6.0)
    view = base.view(2, 3)
    backend.adopt(view, "weights")
    base[0] = 9
    assert view[0, 0] == 9
    assert count_blocks(backend) == 1


STRANGERS: dict[str, Callable[[nn.Linear], Any]] = {
    "a state_dict": lambda module: module.state_dict(),
    "a detach": lambda module: module.weight.detach(),
    "another module": lambda module: (
        nn.Linear(3, 3).load_state_dict(module.state_dict(), assign=True) and module.weight.detach()
    ),
    "a list on the module": lambda module: setattr(module, "kept", [module.weight.detach()]),
    "the data of a gradient": lambda module: module.weight.grad.detach(),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_memory_shared_with_what_was_not_passed_is_refused(
    backend: InMemory, stranger: str
) -> None:
    module = nn.Linear(3, 3)
    module(torch.ones(3)).sum().backward()
    kept = STRANGERS[stranger](module)
    before = [p.data_ptr() for p in module.parameters()]
    with pytest.raises(RequestError, match=r"weight.* shares its memory with 1 tensor"):
        backend.adopt(module, "weights")
    assert [p.data_ptr() for p in module.parameters()] == before
    assert "weights" not in backend.state().tags
    del kept
    module.__dict__.pop("kept", None)
    backend.adopt(module, "weights")


def test_the_hidden_result_that_backward_needs_is_a_stranger(backend: InMemory) -> None:
    result = torch.ones(3, requires_grad=True).exp()
    with pytest.raises(RequestError, match="saved for backward"):
        backend.adopt(result, "weights")


def test_without_the_count_views_are_still_checked(
    backend: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    base = torch.ones(5)
    with pytest.raises(RequestError, match="view of a larger tensor"):
        backend.adopt(base[1:], "weights")
    backend.adopt(base, "weights")


def test_the_caller_s_modes_do_not_interfere(backend: InMemory) -> None:
    tensor = torch.arange(3.0)
    with torch.device("meta"), torch.no_grad():
        backend.adopt(tensor, "weights")
    assert tensor.tolist() == [0, 1, 2]


Cut = tuple[int, int, int, int]
cuts = st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(1, 40), st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(st.lists(cuts, min_size=1, max_size=8), st.booleans(), st.randoms(use_true_random=False))
def test_any_set_of_overlapping_views_keeps_its_aliasing(
    chosen: list[Cut], with_bases: bool, random: Any
) -> None:
    backend = InMemory()
    bases = [torch.arange(100, dtype=dtype) for dtype in (torch.int16, torch.int32, torch.int64)]
    # The same views of tensors that are never adopted say what should happen.
    twins = [base.clone() for base in bases]

    def cut(of: list[torch.Tensor]) -> list[torch.Tensor]:
        return [of[b][start : start + length : step] for b, start, length, step in chosen]

    views, expected = cut(bases), cut(twins)
    if not with_bases:
        views = [view.detach() for view in views]
        bases = []
    target = [*views, *bases]
    random.shuffle(target)
    backend.adopt(target, "weights")
    for index in random.sample(range(len(views)), len(views)):
        value = random.randrange(1000)
        position = random.randrange(len(views[index]))
        views[index][position] = value
        expected[index][position] = value
        backend.suspend()
        backend.resume()
        for got, want in zip(views, expected, strict=True):
            assert torch.equal(got, want)
    assert count_blocks(backend) <= 3
    backend.close()
