"""Suspends that copy only what changed, and copies made beside a running engine."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from statistics import median

import pytest
import torch

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.vmm.copies import CHUNK_BYTES

from .helpers import GIB, LARGE, MIB, holds, pattern


def test_what_did_not_change_is_not_copied(backend: CumemBackend, heavy_bytes: int) -> None:
    with backend.region("weights"):
        tensors = [pattern(heavy_bytes, seed) for seed in range(3)]
        small = [pattern(3 * MIB + 4, seed) for seed in range(40)]
    total = backend.suspend(1).copied_bytes
    backend.resume()
    seconds = []
    for _ in range(5):
        report = backend.suspend(1)
        seconds.append(report.seconds)
        assert (report.copied_bytes, report.clean_bytes) == (0, total)
        backend.resume()
    assert all(holds(tensor, seed) for seed, tensor in enumerate(tensors))
    assert all(holds(tensor, seed) for seed, tensor in enumerate(small))
    # A copy of so much would take the fastest of links several times as long.
    assert min(seconds) < total / (200 * GIB)


def test_what_kernels_changed_is_copied_and_nothing_else(backend: CumemBackend) -> None:
    with backend.region("weights"):
        tensor = pattern(16 * CHUNK_BYTES, 1)
    backend.suspend(1)
    backend.resume()
    for chunk, value in ((3, 7), (11, -1)):
        tensor[chunk * CHUNK_BYTES // 4 + 1234] = value
        expected = tensor.clone()
        report = backend.suspend(1)
        assert report.copied_bytes == CHUNK_BYTES
        backend.resume()
        assert torch.equal(tensor, expected)
    tensor.add_(1)
    assert backend.suspend(1).clean_bytes == 0
    backend.resume()
    assert torch.equal(tensor, expected + 1)


def test_restored_bytes_are_checked_by_the_same_kernel() -> None:
    backend = CumemBackend(CumemOptions(verify="resume"))
    with backend.region("weights"):
        tensor = pattern(4 * LARGE, 5)
    for _ in range(3):
        backend.suspend(1)
        backend.resume()
    assert holds(tensor, 5)
    backend.close()


def test_the_first_sleep_after_staging_copies_nothing(backend: CumemBackend) -> None:
    with backend.region("weights"):
        tensors = [pattern(LARGE + 2 * MIB, seed) for seed in range(8)]
    total = sum(tensor.nbytes for tensor in tensors)
    staged = backend.stage(limit_gib_s=1000.0).wait(120)
    assert staged.copied_bytes == total
    report = backend.suspend(1)
    assert (report.copied_bytes, report.clean_bytes) == (0, total)
    backend.resume()
    assert all(holds(tensor, seed) for seed, tensor in enumerate(tensors))


def test_an_engine_that_keeps_writing(backend: CumemBackend) -> None:
    """500 rounds of staging beside kernels that change values, and change them back."""
    with backend.region("weights"):
        tensor = pattern(12 * MIB, 3)
    chooser = random.Random(3)  # noqa: S311 - not for secrets
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stop = threading.Event()

    def write() -> None:
        with torch.cuda.stream(stream):
            while not stop.is_set():
                first = chooser.randrange(tensor.numel() - 1000)
                part = tensor[first : first + 1000]
                part.bitwise_xor_(0x5A5A5A5A)
                if chooser.random() < 0.5:
                    part.bitwise_xor_(0x5A5A5A5A)
                stream.synchronize()

    for number in range(500):
        stop.clear()
        writer = threading.Thread(target=write)
        writer.start()
        staging = backend.stage(limit_gib_s=1000.0)
        if number % 3:
            staging.wait(60)
        stop.set()
        writer.join()
        torch.cuda.synchronize()
        expected = tensor.clone()
        backend.suspend(1)
        backend.resume()
        assert torch.equal(tensor, expected), f"round {number}"
        staging.wait(60)


@pytest.mark.parametrize("contents", ["as they are", "packed"])
def test_staging_costs_the_engine_little(
    backend: CumemBackend, contents: str, record_property: Callable[[str, object], None]
) -> None:
    with backend.region("weights"):
        tensors = [pattern(GIB, seed) for seed in range(8)]
    if contents == "packed":
        for tensor in tensors:
            tensor.view(torch.bfloat16).normal_(0, 0.02)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def products_per_s(seconds: float) -> float:
        torch.cuda.synchronize()
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            for _ in range(10):
                torch.mm(a, a)
            torch.cuda.synchronize()
            count += 10
        return count / (time.perf_counter() - started)

    products_per_s(2.0)  # until the clocks are what they stay
    costs = []
    for number in range(5):
        for tensor in tensors:
            tensor.bitwise_xor_(number + 1)
        before = products_per_s(0.3)
        staging = backend.stage()
        beside = products_per_s(0.6)
        assert not staging.done, "too short to tell"
        staging.cancel()
        report = staging.wait(60)
        assert (report.spared_bytes > 0) == (contents == "packed")
        costs.append(1 - 2 * beside / (before + products_per_s(0.3)))
    record_property(f"staging_{contents}_costs", [round(cost, 4) for cost in costs])
    assert median(costs) < 0.05, costs
