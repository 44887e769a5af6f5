from __future__ import annotations

import pytest

from sleepbackends.bench import weights as module
from sleepbackends.bench.weights import Weights
from sleepbackends.errors import ContentsLostError

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 64)


def made(size_bytes: int, count: int) -> Weights:
    weights = Weights(size_bytes, "cpu")
    weights.allocate(count)
    weights.fill()
    weights.check()
    return weights


def changed_chunks(weights: Weights, round_: int) -> int:
    """How many chunks, of the size that a tensor may have, another change makes differ."""
    before = [tensor.clone() for tensor in weights.tensors]
    weights.change_some(round_)
    weights.check()
    return sum(
        int((old != new).view(-1, min(16, new.numel())).any(dim=1).sum())
        for old, new in zip(before, weights.tensors, strict=True)
    )


@pytest.mark.parametrize(
    ("size_bytes", "count", "changed"),
    [(512, 64, 5), (512, 4, 1), (64, 512, 5), (32, 1024, 5), (64 * 1024, 1, 1)],
)
def test_one_chunk_in_a_hundred_is_changed(size_bytes: int, count: int, changed: int) -> None:
    weights = made(size_bytes, count)
    assert [changed_chunks(weights, round_) for round_ in range(3)] == [changed] * 3


def test_every_byte_is_changed() -> None:
    weights = made(512, 3)
    for round_ in range(3):
        before = [tensor.view(-1).clone() for tensor in weights.tensors]
        weights.change(round_)
        weights.check()
        for old, new in zip(before, weights.tensors, strict=True):
            assert ((old ^ new) == 0x01010101 * (round_ + 1)).all()
        weights.change_some(round_)


@pytest.mark.parametrize("place", [0, 20, 127])
@pytest.mark.parametrize("index", [0, 2])
def test_a_byte_that_differs_is_seen(index: int, place: int) -> None:
    weights = made(512, 3)
    weights.change(4)
    weights.change_some(5)
    weights.tensors[index][place] ^= 1
    with pytest.raises(ContentsLostError, match=f"weight tensor {index} of 3"):
        weights.check()


def test_tensors_in_each_others_place_are_seen() -> None:
    weights = made(512, 3)
    weights.tensors.reverse()
    with pytest.raises(ContentsLostError, match="weight tensor 0"):
        weights.check()
