"""Tensors may be dropped at any time, in any thread, and nothing stays behind."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from sleepbackends import BusyError
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.residency import Residency

from .helpers import (
    LARGE,
    MIB,
    SLACK,
    blocks,
    drop_caches,
    free_device_bytes,
    holds,
    pattern,
    put,
    spin,
)

TAG_OF = {
    Residency.RESIDENT: "weights",
    Residency.OFFLOADED: "weights",
    Residency.DISCARDED: "kv_cache",
    Residency.UNDEFINED: "kv_cache",
}


def collect_elsewhere() -> None:
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("by_collector", [False, True], ids=["dropped", "collected"])
@pytest.mark.parametrize("residency", list(Residency), ids=lambda r: r.value)
def test_a_tensor_is_freed_in_any_residency(
    backend: CumemBackend, residency: Residency, by_collector: bool
) -> None:
    tag = TAG_OF[residency]
    before = free_device_bytes()
    with backend.region(tag):
        cyclic = [pattern(LARGE, 1)]
        survivor = pattern(LARGE, 2)
    put(backend, tag, residency)
    gc.disable()
    try:
        if by_collector:
            cyclic.append(cyclic)  # type: ignore[arg-type]
            del cyclic
            assert blocks(backend, tag) == 2
            collect_elsewhere()
        else:
            del cyclic
    finally:
        gc.enable()
    torch.cuda.empty_cache()
    assert blocks(backend, tag) == 1
    backend.resume()
    kept = residency in (Residency.RESIDENT, Residency.OFFLOADED)
    assert holds(survivor, 2) if kept else not survivor.any()
    del survivor
    torch.cuda.empty_cache()
    assert blocks(backend, tag) == 0
    assert abs(free_device_bytes() - before) < SLACK


def test_part_of_a_shared_block_is_freed_while_asleep(backend: CumemBackend) -> None:
    with backend.region("weights"):
        tensors = {seed: pattern(MIB, seed) for seed in range(128)}
    backend.suspend(1)
    # Two lie in one segment of torch's, which goes back as a whole.
    for seed in range(0, 128, 4):
        del tensors[seed], tensors[seed + 1]
    drop_caches()
    backend.resume()
    assert all(holds(tensor, seed) for seed, tensor in tensors.items())
    # Room that was freed is given out again, and the next sleep saves what is there now.
    with backend.region("weights"):
        tensors.update({seed: pattern(MIB, seed) for seed in range(200, 216)})
    backend.suspend(1)
    backend.resume()
    assert all(holds(tensor, seed) for seed, tensor in tensors.items())


def test_segments_go_when_their_last_tensor_goes(backend: CumemBackend) -> None:
    before = free_device_bytes()
    with backend.region("weights"):
        tensors = [pattern(size * MIB, size) for size in (1, 2, 5, 20, 40, 100, 300)]
        raw = torch.empty(1000, device="cuda")
    assert free_device_bytes() < before - 400 * MIB
    del tensors, raw
    torch.cuda.empty_cache()
    assert blocks(backend, "weights") == 0
    assert abs(free_device_bytes() - before) < SLACK


def test_memory_does_not_go_while_a_region_is_open(backend: CumemBackend) -> None:
    """torch would hand out parts of segments that are not mapped."""
    with backend.region("weights"):
        first = pattern(LARGE, 1)
        for call in (lambda: backend.suspend(1), lambda: backend.discard(["weights"])):
            with pytest.raises(BusyError, match="in this thread"):
                call()
        second = pattern(1000, 2)
    assert holds(first, 1)
    backend.suspend(1)
    backend.resume()
    assert holds(first, 1)
    assert holds(second, 2)


@pytest.mark.parametrize("size_bytes", [2 * MIB, LARGE])
def test_memory_is_not_unmapped_under_a_running_kernel(
    backend: CumemBackend, size_bytes: int
) -> None:
    results = []
    for seed in range(-1, 5):
        with backend.region("kv_cache"):
            source = pattern(size_bytes, seed)
        result = torch.empty_like(source)
        if seed < 0:  # loads what the others only run, and that waits for the device
            spin(1000)
            result.copy_(source)
            continue
        spin(200_000_000)
        results.append(result.copy_(source))
        assert not torch.cuda.current_stream().query(), "the kernel is to be running still"
        del source
        torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert all(holds(result, seed) for seed, result in enumerate(results))
    assert blocks(backend, "kv_cache") == 0


def test_dropping_while_transitions_run(backend: CumemBackend) -> None:
    """Another thread drops tensors, and torch gives their memory back, all the while."""
    with backend.region("weights"):
        kept = {seed: pattern(4 * MIB, seed) for seed in range(0, 200, 2)}
        doomed = [pattern(4 * MIB, seed) for seed in range(1, 200, 2)]
    stop = threading.Event()

    def drop() -> None:
        while doomed and not stop.wait(0.005):
            doomed.pop()
            torch.cuda.empty_cache()

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        for _ in range(20):
            backend.suspend(1)
            backend.resume()
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    assert all(holds(tensor, seed) for seed, tensor in kept.items())
    doomed.clear()
    kept.clear()
    drop_caches()
    assert blocks(backend, "weights") == 0
