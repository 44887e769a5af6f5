"""Sleeps that pack on a GPU: bit-exact, with little memory left, clean, staged, on a disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.vmm.host_copy import Chunk

from .helpers import GIB, MIB, SLACK, drop_caches, free_device_bytes, pattern

Property = Callable[[str, object], None]

LITTLE = 400 * MIB
"""What is free of a device that is nearly full."""

TENSOR_BYTES = 256 * MIB
BF16, INT16 = torch.bfloat16, torch.int16


def weights(size_bytes: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Normally distributed numbers, the same for the same seed."""
    source = torch.Generator("cuda").manual_seed(seed)
    tensor = torch.empty(size_bytes // dtype.itemsize, dtype=dtype, device="cuda")
    return tensor.normal_(0.0, 0.02, generator=source)


def adversarial(size_bytes: int, seed: int) -> torch.Tensor:
    """All exponents, infinities, payloads of NaN, subnormals, constants, and weights, by turns."""
    source = torch.Generator("cuda").manual_seed(seed)
    tensor = weights(size_bytes, seed).view(INT16)
    for number, part in enumerate(torch.split(tensor, 5 * MIB)):
        if number % 4 == 0:
            part.random_(-(1 << 15), 1 << 15, generator=source)
        elif number % 4 == 1:
            part.random_(0x7F00, 0x7FFF, generator=source)
        elif number % 4 == 2:
            part.fill_(seed)
    return tensor


def same(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, NaN or not."""
    return torch.equal(tensor.view(INT16), expected.view(INT16))


@contextmanager
def filled(leave_bytes: int) -> Iterator[None]:
    """Have all memory of the device in use but so much."""
    filler = torch.empty(free_device_bytes() - leave_bytes, dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del filler
        drop_caches()


def chunks_of(backend: CumemBackend) -> list[Chunk]:
    return [chunk for copy in backend._copies.all() for chunk in copy.chunks]


@pytest.fixture
def packing(backend: CumemBackend) -> CumemBackend:
    """A backend on a device that packs, or else the test is skipped."""
    return packs(backend)


def packs(backend: CumemBackend) -> CumemBackend:
    """Have its kernels loaded, without which a first suspend does not pack, or skip the test."""
    backend._warm_up.begin(0)
    backend._warm_up.wait([0])
    if backend.cuda.packing(0) is None:
        pytest.skip("the kernels of packing cannot be had here; the log says why")
    return backend


def test_weights_sleep_in_fewer_bytes(
    packing: CumemBackend, heavy_bytes: int, record_property: Property
) -> None:
    count = max(2, min(16, heavy_bytes // TENSOR_BYTES))
    with packing.region("weights"):
        tensors = [weights(TENSOR_BYTES, seed) for seed in range(count)]
    total = count * TENSOR_BYTES
    for number in range(3):
        free = free_device_bytes()
        down = packing.suspend(1)
        assert down.copied_bytes == total
        assert 0.65 < down.packing_ratio < 0.72
        assert packing._store.held_bytes < 0.72 * total
        assert free_device_bytes() - free > total - SLACK, "slots are given back"
        up = packing.resume()
        assert up.link_bytes == down.link_bytes
        for index, tensor in enumerate(tensors):
            assert same(tensor, weights(TENSOR_BYTES, 100 * number + index))
            tensor.copy_(weights(TENSOR_BYTES, 100 * (number + 1) + index))
        record_property(f"ratio_{number}", round(down.packing_ratio, 4))
        record_property(f"suspend_gib_s_{number}", round(down.copied_bytes_s / GIB, 2))
        record_property(f"resume_gib_s_{number}", round(up.copied_bytes_s / GIB, 2))


def test_everything_that_is_hard_to_pack(packing: CumemBackend, record_property: Property) -> None:
    with packing.region("weights"):
        tensors = [
            adversarial(TENSOR_BYTES, 7),
            weights(70 * MIB + 6, 8),
            weights(5 * MIB + 12, 9, torch.float32),
            weights(3 * MIB, 10, torch.float16),
            *(pattern(MIB // 3, seed) for seed in range(20)),
        ]
    expected = [tensor.clone() for tensor in tensors]
    report = packing.suspend(1)
    assert {chunk.is_packed for chunk in chunks_of(packing)} == {True, False}
    record_property("ratio", round(report.packing_ratio, 4))
    packing.resume()
    for tensor, before in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))
    clean = packing.suspend(1)
    assert clean.copied_bytes == 0, "packed or not, what did not change is clean"
    packing.resume()
    for tensor, before in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("left", [LITTLE - 50 * MIB, 100 * MIB, 40 * MIB])
def test_with_little_device_memory(
    packing: CumemBackend, left: int, record_property: Property
) -> None:
    with packing.region("weights"):
        tensors = [weights(TENSOR_BYTES, seed) for seed in range(4)]
    packing.suspend(1)  # what the driver takes for kernels, it has by now
    packing.resume()
    for seed, tensor in enumerate(tensors):
        tensor.copy_(weights(TENSOR_BYTES, 50 + seed))
    torch.cuda.empty_cache()
    with filled(leave_bytes=left):
        free = free_device_bytes()
        assert free < LITTLE
        record_property("free_mib", free // MIB)
        down = packing.suspend(1)
        record_property("ratio_down", round(down.packing_ratio, 4))
        assert down.spared_bytes > 0, "it packs with what there is"
        up = packing.resume()
        record_property("ratio_up", round(up.packing_ratio, 4))
        assert up.spared_bytes > 0
    for seed, tensor in enumerate(tensors):
        assert same(tensor, weights(TENSOR_BYTES, 50 + seed))


def test_a_resume_without_room_for_a_slot_unpacks_on_the_host(
    packing: CumemBackend, record_property: Property
) -> None:
    with packing.region("weights"):
        tensors = [weights(TENSOR_BYTES, seed) for seed in range(4)]
    packing.suspend(1)
    needed = sum(block.extra.size_bytes for block in packing.ledger.blocks())
    with filled(leave_bytes=needed + 12 * MIB):
        record_property("free_mib", (free_device_bytes() - needed) // MIB)
        report = packing.resume()
        record_property("gib_s", round(report.copied_bytes_s / GIB, 2))
        assert report.spared_bytes == 0
    for seed, tensor in enumerate(tensors):
        assert same(tensor, weights(TENSOR_BYTES, seed))


def test_random_bits_are_copied_as_they_are(backend: CumemBackend) -> None:
    with backend.region("weights"):
        tensor = weights(2 * TENSOR_BYTES, 1)
        tensor.view(INT16).random_(-(1 << 15), 1 << 15)
    expected = tensor.clone()
    report = backend.suspend(1)
    assert report.spared_bytes == 0
    assert backend._store.held_bytes <= 1.001 * report.copied_bytes
    backend.resume()
    assert same(tensor, expected)


def test_the_host_reads_what_is_packed(packing: CumemBackend) -> None:
    with packing.region("weights"):
        tensor = weights(TENSOR_BYTES, 3)
    address = tensor.data_ptr()
    packing.suspend(1)
    view = packing.host_copy(address + 31 * MIB, 40 * MIB)
    found = torch.frombuffer(bytearray(view), dtype=INT16)
    packing.resume()
    first = 31 * MIB // 2
    assert torch.equal(found, tensor.view(INT16)[first : first + 20 * MIB].cpu())


@pytest.mark.parametrize("verify", ["off", "resume"])
def test_staged_copies_are_packed_and_clean(verify: str, record_property: Property) -> None:
    backend = packs(CumemBackend(CumemOptions.model_validate({"verify": verify})))
    with backend.region("weights"):
        tensors = [weights(TENSOR_BYTES, seed) for seed in range(4)]
    staged = backend.stage(limit_gib_s=1000.0).wait(120)
    assert staged.copied_bytes == 4 * TENSOR_BYTES
    record_property("ratio", round(1 - staged.spared_bytes / staged.copied_bytes, 4))
    record_property("gib_s", round(staged.copied_bytes / staged.seconds / GIB, 2))
    assert staged.spared_bytes > 0.25 * staged.copied_bytes
    report = backend.suspend(1)
    assert (report.copied_bytes, report.clean_bytes) == (0, 4 * TENSOR_BYTES)
    assert backend.resume().spared_bytes == staged.spared_bytes
    for seed, tensor in enumerate(tensors):
        assert same(tensor, weights(TENSOR_BYTES, seed))
    backend.close()


def test_an_engine_that_keeps_writing_to_packed_weights(packing: CumemBackend) -> None:
    """Staging beside kernels that change exponents, and change them back."""
    with packing.region("weights"):
        tensor = weights(48 * MIB, 3)
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stop = threading.Event()
    packed = 0

    def write() -> None:
        number = 0
        with torch.cuda.stream(stream):
            while not stop.is_set():
                part = tensor.view(INT16)[number % 20 * MIB :][:5000]
                part.bitwise_xor_(0x3F80)
                if number % 3:
                    part.bitwise_xor_(0x3F80)
                stream.synchronize()
                number += 1
                time.sleep(0.001 * (number % 2))

    for number in range(100):
        stop.clear()
        writer = threading.Thread(target=write)
        writer.start()
        staging = packing.stage(limit_gib_s=1000.0)
        if number % 3:
            packed += staging.wait(60).spared_bytes
        stop.set()
        writer.join()
        torch.cuda.synchronize()
        expected = tensor.clone()
        packing.suspend(1)
        packing.resume()
        assert same(tensor, expected), f"round {number}"
        staging.wait(60)
    assert packed, "nothing was packed"


def test_packed_on_a_disk(tmp_path: Path, record_property: Property) -> None:
    backend = packs(CumemBackend(CumemOptions(tier="disk", disk_directory=tmp_path)))
    with backend.region("weights"):
        tensors = [weights(TENSOR_BYTES, seed) for seed in range(4)]
    down = backend.suspend(1)
    assert backend._store.held_bytes < 0.75 * down.copied_bytes
    record_property("ratio", round(down.packing_ratio, 4))
    assert backend.resume().link_bytes == down.link_bytes
    for seed, tensor in enumerate(tensors):
        assert same(tensor, weights(TENSOR_BYTES, seed))
    backend.close()
