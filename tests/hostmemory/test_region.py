from __future__ import annotations

import ctypes
import importlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sleepbackends.errors import (
    ClosedError,
    HostMemoryError,
    RequestError,
    UnsupportedOperationError,
)
from sleepbackends.host_limits import HostMemory
from sleepbackends.hostmemory import backend as backend_module
from sleepbackends.hostmemory import driver
from sleepbackends.mechanism import POISON_BYTE, Fill
from sleepbackends.residency import Residency
from sleepbackends.settings import BackendSettings

from .conftest import InMemory, count_blocks, resident_bytes


def available(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    room = HostMemory(size_bytes, None, "a test")
    monkeypatch.setattr(backend_module, "host_memory", lambda: room)


def test_numpy_and_torch_arrays_hold_zeros_of_the_asked_shape(backend: InMemory) -> None:
    with backend.region("weights") as region:
        number = region.empty(5, "f8")
        matrix = region.zeros((2, 3), np.int16)
        tensor = region.empty([4, 2], torch.bfloat16)
        raw = region.buffer(7)
    assert (number.shape, number.dtype) == ((5,), np.float64)
    assert (matrix.shape, matrix.dtype) == ((2, 3), np.int16)
    assert (tensor.shape, tensor.dtype) == ((4, 2), torch.bfloat16)
    assert (raw.nbytes, raw.format, raw.readonly) == (7, "B", False)
    assert not number.any()
    assert not matrix.any()
    assert not tensor.any()
    assert bytes(raw) == bytes(7)
    assert backend.state().tags["weights"].resident_bytes == 40 + 12 + 16 + 7


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.bool, torch.complex64, torch.uint16, "S3", "M8[s]", [("a", "i4")]],
)
def test_every_plain_dtype_comes_back_bit_exact(backend: InMemory, dtype: Any) -> None:
    with backend.region("weights") as region:
        array = region.empty((3, 5), dtype)
    size_bytes = backend.state().tags["weights"].resident_bytes
    [block] = backend.ledger.blocks()
    pattern = bytes(i * 37 % 256 for i in range(size_bytes))
    driver.view(block.address, size_bytes)[:] = pattern
    backend.suspend()
    backend.resume()
    assert bytes(driver.view(block.address, size_bytes)) == pattern
    assert tuple(array.shape) == (3, 5)


@pytest.mark.parametrize("shape", [0, (3, 0), [0, 2, 2]])
@pytest.mark.parametrize("dtype", ["f4", torch.float32])
def test_arrays_without_elements_take_no_memory(backend: InMemory, shape: Any, dtype: Any) -> None:
    with backend.region("weights") as region:
        array = region.empty(shape, dtype)
        assert region.buffer(0).nbytes == 0
    assert tuple(array.shape) == ((0,) if shape == 0 else tuple(shape))
    assert backend.state().tags["weights"].blocks == 0


def test_a_shape_of_no_axes_is_one_element(backend: InMemory) -> None:
    with backend.region("weights") as region:
        assert region.empty((), torch.float32).shape == ()
        assert region.empty((), "f4").shape == ()
    del region
    assert count_blocks(backend) == 0


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(-1, "f4"), ((2, -3), torch.float32), ("ab", "f4"), (1.5, "f4"), (2, object), (2, "nope"),
     (2, [("a", object)]), (2, torch.qint8)],
)  # fmt: skip
def test_impossible_arrays_are_refused(backend: InMemory, shape: Any, dtype: Any) -> None:
    with backend.region("weights") as region, pytest.raises(RequestError):
        region.empty(shape, dtype)
    with backend.region("weights") as region, pytest.raises(RequestError):
        region.buffer(-1)
    assert count_blocks(backend) == 0


@pytest.mark.parametrize("shape", [1 << 50, (1 << 40, 1 << 40)])
def test_too_large_is_refused_with_both_sizes(backend: InMemory, shape: Any) -> None:
    for dtype in ("f4", torch.float32):
        with backend.region("weights") as region, pytest.raises(HostMemoryError) as caught:
            region.empty(shape, dtype)
        assert caught.value.needed_bytes > caught.value.available_bytes > 0
    assert count_blocks(backend) == 0


def test_room_is_what_host_limits_say(backend: InMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 8192)
    with backend.region("weights") as region:
        kept = region.buffer(8192)
        with pytest.raises(HostMemoryError, match="limited by a test"):
            region.buffer(8193)
        backend.suspend()
        available(monkeypatch, 8191)
        with pytest.raises(HostMemoryError):
            backend.resume()
    assert backend.state().tags["weights"].residencies == {Residency.OFFLOADED}
    available(monkeypatch, 8192)
    backend.resume()
    assert bytes(kept) == bytes(8192)


def test_an_ended_region_refuses(backend: InMemory) -> None:
    with backend.region("weights") as region:
        pass
    for call in (
        lambda: region.buffer(1),
        lambda: region.empty(1, "u1"),
        lambda: region.zeros(1, "u1"),
        lambda: region.from_safetensors("x"),
    ):
        with pytest.raises(RequestError, match="'weights' has ended"):
            call()


def test_a_closed_backend_refuses_and_mapped_memory_stays(backend: InMemory) -> None:
    with backend.region("weights") as region:
        array = region.empty(4, "u1")
        array[:] = 3
        backend.close()
        with pytest.raises(ClosedError):
            region.empty(1, "u1")
    assert array.tolist() == [3] * 4


@pytest.mark.parametrize("tag", ["", "a b", "a\n"])
def test_improper_tags_are_refused(backend: InMemory, tag: str) -> None:
    with pytest.raises(RequestError), backend.region(tag):
        pass


VIEWS: list[Callable[[Any], Any]] = [
    lambda region: region.empty((4, 4), "f4")[1:, ::2],
    lambda region: region.empty((4, 4), "f4").view("u1"),
    lambda region: memoryview(region.empty(16, "u1"))[4:],
    lambda region: region.buffer(16)[3:],
    lambda region: region.empty((4, 4), torch.float32)[1:].t(),
    lambda region: region.empty((4, 4), torch.float32).numpy()[2:],
    lambda region: torch.from_numpy(region.empty(4, "f4"))[1:],
    lambda region: region.empty(4, torch.float32).untyped_storage(),
    lambda region: torch.nn.Parameter(region.empty(4, torch.float32)),
]


@pytest.mark.parametrize("make", VIEWS)
def test_the_last_view_keeps_the_block_and_its_end_frees_it(
    backend: InMemory, make: Callable[[Any], Any]
) -> None:
    with backend.region("weights") as region:
        view = make(region)
    assert count_blocks(backend) == 1
    del view
    assert count_blocks(backend) == 0


@pytest.mark.parametrize("how", ["resident", "offloaded", "discarded", "undefined"])
def test_freeing_is_legal_in_every_residency(backend: InMemory, how: str) -> None:
    with backend.region("weights") as region:
        array = region.empty(100, "u1")
    if how == "offloaded":
        backend.suspend()
    elif how != "resident":
        backend.discard(["weights"])
    if how == "undefined":
        backend.resume()
    assert backend.state().tags["weights"].residencies == {Residency(how)}
    del array
    assert count_blocks(backend) == 0
    assert not backend.saved
    assert not backend.suspend().changed


def test_freeing_from_other_threads_while_transitions_run(backend: InMemory) -> None:
    with backend.region("weights") as region:
        arrays = [region.empty(5000, "u1") for _ in range(200)]

    def drop() -> None:
        while arrays:
            arrays.pop()

    threads = [threading.Thread(target=drop) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        backend.suspend()
        backend.resume()
    assert count_blocks(backend) == 0
    assert not backend.saved


@pytest.mark.parametrize(
    ("fill", "byte"), [(Fill.ZERO, 0), (Fill.POISON, POISON_BYTE), (Fill.NONE, 0)]
)
def test_discarded_memory_comes_back_filled(backend: InMemory, fill: Fill, byte: int) -> None:
    backend.settings = BackendSettings(fill=fill)
    with backend.region("kv_cache") as region:
        array = region.empty(10_000, "u1")
    array[:] = 7
    backend.discard(["kv_cache"])
    assert backend.resume().undefined_tags == {"kv_cache"}
    assert (array == byte).all()


def test_a_block_of_many_populated_parts_is_all_there(
    backend: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "_POPULATE_BYTES", 1 << 20)
    monkeypatch.setattr(backend_module, "usable_cpus", lambda: 3)
    populated: list[tuple[int, int]] = []
    monkeypatch.setattr(driver, "populate", lambda *part: populated.append(part))
    with backend.region("weights") as region:
        size_bytes = (5 << 20) + 1
        buffer = region.buffer(size_bytes)
    backend.discard(["weights"])
    backend.resume()
    [block] = backend.ledger.blocks()
    parts = sorted(populated)
    assert parts[0][0] == block.address
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(parts))
    assert sum(n for _, n in parts) == driver.round_up(size_bytes)
    assert len(buffer) == size_bytes


def test_a_failed_populate_leaves_the_block_asleep(
    backend: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with backend.region("weights") as region:
        buffer = region.buffer(10_000)
    buffer[:3] = b"abc"
    backend.suspend()

    populate = driver.populate

    def fail(address: int, size_bytes: int) -> None:
        populate(address, size_bytes)
        raise HostMemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(driver, "populate", fail)
        with pytest.raises(HostMemoryError, match="no more"):
            backend.resume()
    assert backend.state().tags["weights"].residencies == {Residency.OFFLOADED}
    [block] = backend.ledger.blocks()
    assert resident_bytes(block.address, driver.round_up(block.size_bytes)) == 0
    backend.resume()
    assert bytes(buffer[:4]) == b"abc\0"


def test_a_failed_first_write_leaves_no_memory(backend: InMemory) -> None:
    tag, seen = backend.open_tag("weights"), []

    def fail(view: memoryview) -> None:
        view[:] = b"x" * len(view)
        seen.append(ctypes.addressof(ctypes.c_ubyte.from_buffer(view)))
        raise RequestError("no")

    with pytest.raises(RequestError, match="no"):
        backend.allocate(tag, 8192, fail)
    assert resident_bytes(seen[0], 8192) == 0


def test_without_numpy_the_error_says_what_to_install(
    backend: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with (
        backend.region("weights") as region,
        pytest.raises(UnsupportedOperationError, match="pip install") as caught,
    ):
        region.empty(1, "u1")
    assert "numpy" in caught.value.message
