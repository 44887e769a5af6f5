from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from sleepbackends.errors import HostMemoryError, RequestError, WeightsFileError
from sleepbackends.host_limits import HostMemory
from sleepbackends.hostmemory import backend as backend_module
from sleepbackends.hostmemory import driver, weights_file

from .conftest import InMemory, count_blocks


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    bits = torch.arange(-3000, 3000, dtype=torch.int16)
    return {
        "matrix": torch.randn(17, 3),
        "every kind of NaN": bits.view(torch.bfloat16),
        "scalar": torch.tensor(4.5, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
        "eight": torch.arange(100, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
    }


@pytest.fixture
def path(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    return path


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_tensors_come_back_bit_exact_each_in_its_own_block(
    backend: InMemory, path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    with backend.region("weights") as region:
        loaded = region.from_safetensors(path)
    assert loaded.keys() == tensors.keys()
    for _ in range(2):
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype
            assert loaded[name].shape == tensor.shape
            assert raw(loaded[name]) == raw(tensor)
        backend.suspend()
        backend.resume()
    assert count_blocks(backend) == len(tensors) - 1
    del loaded["matrix"]
    assert count_blocks(backend) == len(tensors) - 2


def test_numpy_arrays(backend: InMemory, tmp_path: Path) -> None:
    want = {"a": torch.randn(4, 5), "b": torch.arange(3)}
    safetensors.torch.save_file(want, tmp_path / "x")
    with backend.region("weights") as region:
        loaded = region.from_safetensors(str(tmp_path / "x"), framework="numpy")
    assert all(isinstance(array, np.ndarray) for array in loaded.values())
    assert all(np.array_equal(loaded[name], want[name].numpy()) for name in want)


def test_a_dtype_that_numpy_has_not_names_the_tensor_and_the_way_out(
    backend: InMemory, path: Path
) -> None:
    with backend.region("weights") as region:
        with pytest.raises(WeightsFileError, match=r"BF16|F8_E4M3") as caught:
            region.from_safetensors(path, framework="numpy")
        assert "framework='torch'" in caught.value.hint
        with pytest.raises(RequestError, match="jax"):
            region.from_safetensors(path, framework="jax")  # type: ignore[arg-type]
    assert count_blocks(backend) == 0


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def cut_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def lie_about_the_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def garble(path: Path) -> None:
    path.write_bytes(b"not a model at all, but some text that is long enough")


def change_an_offset(path: Path) -> None:
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    header["matrix"]["data_offsets"][1] += 4
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size :])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def make_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [truncate, cut_the_header, lie_about_the_header, garble, change_an_offset, empty, remove,
     make_a_directory],
)  # fmt: skip
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_damaged_file_is_refused_before_anything_is_allocated(
    backend: InMemory,
    path: Path,
    damage: Callable[[Path], None],
    framework: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damage(path)
    allocated: list[Any] = []
    monkeypatch.setattr(backend, "allocate", lambda *what: allocated.append(what))
    with backend.region("weights") as region:
        with pytest.raises(WeightsFileError) as caught:
            region.from_safetensors(path, framework=framework)
        assert str(path) in caught.value.message
    assert not allocated


def replace_header(path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    check = weights_file.WeightsFile._check_format

    def check_then_replace(self: weights_file.WeightsFile) -> None:
        check(self)
        path.write_bytes(len(text).to_bytes(8, "little") + text)

    monkeypatch.setattr(weights_file.WeightsFile, "_check_format", check_then_replace)


@pytest.mark.parametrize(
    "text", [b"{", b"\xff\xfe", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b"7"]
)
def test_a_file_that_changes_after_the_check_is_refused(
    backend: InMemory, path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    replace_header(path, monkeypatch, text)
    with backend.region("weights") as region, pytest.raises(WeightsFileError):
        region.from_safetensors(path)
    assert count_blocks(backend) == 0


def test_a_file_that_ends_while_it_is_read_leaves_nothing(
    backend: InMemory, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = weights_file.WeightsFile._read_entries

    def entries_then_cut(self: weights_file.WeightsFile, *how: Any) -> Any:
        found = entries(self, *how)
        truncate(path)
        return found

    monkeypatch.setattr(weights_file.WeightsFile, "_read_entries", entries_then_cut)
    with backend.region("weights") as region:
        with pytest.raises(WeightsFileError, match="ended inside tensor") as caught:
            region.from_safetensors(path)
        # Also while the error, and with it the frames it passed, is still referred to.
        assert count_blocks(backend) == 0
    assert caught.value.backend == "in-memory"


def test_out_of_room_half_way_leaves_nothing(
    backend: InMemory, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    map_memory, left = driver.map_memory, iter([True, True, False])

    def map_two(address: int, size_bytes: int) -> None:
        if not next(left):
            raise HostMemoryError("no more")
        map_memory(address, size_bytes)

    monkeypatch.setattr(driver, "map_memory", map_two)
    with backend.region("weights") as region:
        with pytest.raises(HostMemoryError, match="no more") as caught:
            region.from_safetensors(path)
        assert count_blocks(backend) == 0
    assert caught.value.tags == frozenset()


def test_room_for_the_whole_file_is_checked_first(
    backend: InMemory, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "host_memory", lambda: HostMemory(4096, None, "a test"))
    monkeypatch.setattr(backend, "allocate", pytest.fail)
    with backend.region("weights") as region, pytest.raises(HostMemoryError):
        region.from_safetensors(path)
