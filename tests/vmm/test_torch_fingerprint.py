"""The expression of torch is the same function, at any size and address."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sleepbackends.cumem.torch_fingerprint import TorchFingerprints
from sleepbackends.errors import MechanismError, UnsupportedOperationError
from sleepbackends.vmm import torch_fingerprint as module
from sleepbackends.vmm.accelerator import Accelerator
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.torch_fingerprint import torch_fingerprint
from tests.fingerprints import reference

DATA = random.Random(3).randbytes(70_000)  # noqa: S311 - test data


def tensor(data: bytes, offset: int = 0) -> torch.Tensor:
    return torch.tensor(list(bytes(offset) + data), dtype=torch.uint8)[offset:]


@pytest.mark.parametrize("offset", [0, 1, 7, 8])
@pytest.mark.parametrize("size_bytes", [*range(18), 4095, 4096])
def test_it_is_the_function(size_bytes: int, offset: int) -> None:
    data = DATA[:size_bytes]
    assert torch_fingerprint(tensor(data, offset)) == reference(data)


@given(st.binary(max_size=200))
def test_it_is_the_function_of_any_bytes(data: bytes) -> None:
    assert torch_fingerprint(tensor(data)) == reference(data)


@pytest.mark.parametrize("offset", [0, 3])
def test_pieces_are_put_together(monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 4096)
    bytes_of_pieces = [DATA[:size] for size in (4096, 4097, 3 * 4096, len(DATA))]
    for data in bytes_of_pieces:
        assert torch_fingerprint(tensor(data, offset)) == reference(data)


def test_the_tensor_is_only_read() -> None:
    data = tensor(DATA)
    torch_fingerprint(data)
    assert torch.equal(data, tensor(DATA))


def test_without_cuda() -> None:
    if torch.cuda.is_available():
        pytest.skip("torch has a CUDA device here")
    with pytest.raises(UnsupportedOperationError):
        TorchFingerprints(0)


class FakeCuda:
    """Streams and events as far as they are needed, over tensors of the host."""

    def __init__(self, *, synchronizes: bool = True) -> None:
        self.synchronizes = synchronizes

    def Stream(self, device: int) -> FakeCuda:  # noqa: N802 - torch's name
        return self

    def stream(self, stream: FakeCuda) -> FakeCuda:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def record_event(self) -> FakeCuda:
        return self

    def synchronize(self) -> None:
        if not self.synchronizes:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A way of torch whose device is the host; a span's address is where its bytes are in DATA."""

    class Torch:
        cuda = FakeCuda()

    monkeypatch.setattr(Accelerator, "import_torch", lambda _: Torch)
    way = TorchFingerprints(0)
    monkeypatch.setattr(
        way, "_bytes", lambda span: tensor(DATA[span.address : span.address + span.size_bytes])
    )
    return way


def test_several_are_outstanding(fake: Any) -> None:
    assert fake.prepare(1)
    first = fake.queue([Span(0, 100), Span(5, 0)])
    second = fake.queue([Span(1, 9)])
    assert second.result() == [reference(DATA[1:10])]
    assert first.result() == [reference(DATA[:100]), 0]
    assert first.result() == [reference(DATA[:100]), 0]
    fake.close()


def test_what_torch_refuses(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake._stream.synchronizes = False
    pending = fake.queue([Span(0, 8)])
    with pytest.raises(MechanismError, match="illegal memory access"):
        pending.result()

    def no_room(span: Span) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(fake, "_bytes", no_room)
    assert fake.queue([Span(0, 8)]) is None
