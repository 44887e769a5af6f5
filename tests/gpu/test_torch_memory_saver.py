"""What users of torch_memory_saver rely on, with tensors and graphs of torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from sleepbackends.adapters.torch_memory_saver import TorchMemorySaver, configure_subprocess
from sleepbackends.errors import BusyError, PolicyConflictError

from .helpers import (
    GIB,
    LARGE,
    MIB,
    SLACK,
    drop_caches,
    free_device_bytes,
    holds,
    pattern,
    run_script,
    spin,
    tag_of,
)


@pytest.fixture
def saver() -> Iterator[TorchMemorySaver]:
    saver = TorchMemorySaver()
    yield saver
    saver.backend.close()


# Regions and tags


def test_a_paused_tensor_gives_its_memory_back_and_keeps_its_address(
    saver: TorchMemorySaver, heavy_bytes: int
) -> None:
    outside = pattern(LARGE, 1)
    with saver.region():
        tensor = pattern(heavy_bytes, 2)
    address, awake_free = tensor.data_ptr(), free_device_bytes()
    saver.pause()
    assert free_device_bytes() - awake_free > heavy_bytes - SLACK
    saver.resume()
    assert abs(free_device_bytes() - awake_free) < SLACK
    assert tensor.data_ptr() == address
    assert holds(outside, 1)
    assert not tensor.any()
    tensor.copy_(pattern(heavy_bytes, 3))
    assert holds(tensor, 3)
    del tensor
    drop_caches()
    assert free_device_bytes() - awake_free > heavy_bytes - SLACK
    assert not saver.pause().changed


def test_tags_come_and_go_on_their_own(saver: TorchMemorySaver) -> None:
    with saver.region("type1", enable_cpu_backup=True):
        first = pattern(LARGE, 1)
    with saver.region(tag="type2", enable_cpu_backup=True):
        second = pattern(LARGE, 2)
    saver.pause("type1")
    assert holds(second, 2)
    saver.pause("type2")
    with pytest.raises(PolicyConflictError):
        saver.pause()
    saver.resume("type2")
    assert holds(second, 2)
    saver.resume("type1")
    for _ in range(3):
        saver.pause("type1")
        saver.resume("type1")
    assert holds(first, 1)
    with pytest.raises(PolicyConflictError):
        saver.resume()


def test_regions_nest(saver: TorchMemorySaver) -> None:
    with saver.region("weights", enable_cpu_backup=True):
        first = pattern(LARGE, 1)
        with saver.region("gradients"):
            gradients = pattern(LARGE, 2)
        small = pattern(1000, 3)
    assert tag_of(saver.backend, gradients) == "discard:gradients"
    saver.pause()
    saver.resume()
    assert holds(first, 1)
    assert holds(small, 3)
    assert not gradients.any()


def test_no_pause_begins_in_a_region(saver: TorchMemorySaver) -> None:
    with saver.region():
        tensor = pattern(LARGE, 1)
        with pytest.raises(BusyError, match="region"):
            saver.pause()
    saver.pause()
    saver.resume()
    del tensor


def test_a_region_belongs_to_its_thread(saver: TorchMemorySaver) -> None:
    opened, done = threading.Event(), threading.Event()

    def hold() -> None:
        with saver.region("other"):
            opened.set()
            assert done.wait(60)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(hold)
        assert opened.wait(60)
        mine = pattern(LARGE, 1)
        done.set()
        running.result(60)
    assert tag_of(saver.backend, mine) is None


def test_what_a_kernel_wrote_just_before_is_kept(saver: TorchMemorySaver) -> None:
    with saver.region(enable_cpu_backup=True):
        tensor = pattern(LARGE, 1)
    spin(300_000_000)
    tensor.copy_(pattern(LARGE, 2))
    saver.pause()
    saver.resume()
    assert holds(tensor, 2)


# Saved contents


@pytest.mark.parametrize("zero_copy", [False, True])
def test_contents_can_be_read_while_they_are_away(saver: TorchMemorySaver, zero_copy: bool) -> None:
    with saver.region(enable_cpu_backup=True):
        large, typed = pattern(20 * MIB, 1), torch.randn(10, 20, 30, device="cuda")
    with saver.region():
        dropped = pattern(20 * MIB, 2)
    expected, view = typed.cpu(), large[1000:5000]
    part = view.cpu()
    assert saver.get_cpu_backup(typed) is None
    saver.pause()
    for tensor, contents in ((typed, expected), (view, part)):
        saved = saver.get_cpu_backup(tensor, zero_copy=zero_copy)
        assert saved is not None
        assert torch.equal(saved, contents)
    with pytest.raises(PolicyConflictError, match="gone"):
        saver.get_cpu_backup(dropped)
    unrelated = pattern(20 * MIB, 3)
    assert saver.get_cpu_backup(unrelated) is None
    del saved
    saver.resume()
    assert torch.equal(typed.cpu(), expected)
    assert holds(large, 1)
    assert saver.get_cpu_backup(typed) is None


@pytest.mark.parametrize("retain", [False, True])
def test_contents_are_fresh_with_and_without_retained_memory(
    saver: TorchMemorySaver, retain: bool
) -> None:
    saver.retain_cpu_backup = retain
    with saver.region(enable_cpu_backup=True):
        tensors = [pattern(LARGE, seed) for seed in range(4)]
    for cycle in range(3):
        tensors[cycle].copy_(pattern(LARGE, 10 + cycle))
        saver.pause()
        saver.resume()
        seeds = [10 + i if i <= cycle else i for i in range(4)]
        assert all(holds(tensor, seed) for tensor, seed in zip(tensors, seeds, strict=True))


def test_host_memory_comes_back_after_a_resume(saver: TorchMemorySaver, heavy_bytes: int) -> None:
    with saver.region(enable_cpu_backup=True):
        tensor = pattern(heavy_bytes, 1)

    def resident_bytes() -> int:
        resident: int = psutil.Process().memory_info().rss
        return resident

    before = resident_bytes()
    saver.pause()
    assert resident_bytes() - before > heavy_bytes * 3 // 4
    saver.resume()
    deadline = time.monotonic() + 30
    while resident_bytes() - before > heavy_bytes // 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert resident_bytes() - before <= heavy_bytes // 4
    assert holds(tensor, 1)


# Memory of torch's own


@pytest.mark.parametrize("inside", [True, False])
def test_disabled_memory_is_not_paused_and_does_not_stay(
    saver: TorchMemorySaver, inside: bool
) -> None:
    with saver.region("weights", enable_cpu_backup=True):
        weights = pattern(LARGE, 1)
        if inside:
            with saver.disable():
                kept = pattern(LARGE, 2)
            after = pattern(LARGE, 3)
    if not inside:
        after = weights
        saver.pause()
        with saver.disable():
            kept = pattern(LARGE, 2)
            free = free_device_bytes()
            temporary = pattern(GIB, 4)
            assert holds(temporary, 4)
            del temporary
        assert abs(free_device_bytes() - free) < SLACK
        saver.resume()
    assert tag_of(saver.backend, kept) is None
    assert tag_of(saver.backend, after) == "offload:weights"
    saver.pause()
    assert holds(kept, 2)
    saver.resume()
    assert holds(weights, 1)


def test_a_margin_is_left_free(saver: TorchMemorySaver) -> None:
    saver.memory_margin_bytes = free_device_bytes() - 2 * GIB
    with saver.region():
        tensor = pattern(GIB, 1)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 * GIB // 2, dtype=torch.uint8, device="cuda")
        small = pattern(LARGE, 2)
    outside = torch.empty(3 * GIB // 2, dtype=torch.uint8, device="cuda")
    saver.pause()
    saver.resume()
    saver.memory_margin_bytes = 0
    with saver.region():
        more = pattern(2 * GIB, 3)
    assert holds(more, 3)
    del tensor, small, outside


# Several devices, and the end of the process


def test_memory_of_two_devices(saver: TorchMemorySaver) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    tensors = []
    for device in (0, 1):
        with torch.cuda.device(device), saver.region(enable_cpu_backup=True):
            tensors.append(pattern(LARGE, device, device))
    free = [free_device_bytes(device) for device in (0, 1)]
    saver.pause()
    for device in (0, 1):
        assert free_device_bytes(device) - free[device] > LARGE - SLACK
    saver.resume()
    assert all(holds(tensor, seed) for seed, tensor in enumerate(tensors))


ENDING = """
import torch
from sleepbackends.adapters.torch_memory_saver import torch_memory_saver

torch_memory_saver.hook_mode = "preload"
with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
    weights = torch.ones(64 << 20, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch_memory_saver.cuda_graph(graph, tag="cuda_graph"):
    result = weights + 1
torch_memory_saver.pause()
torch_memory_saver.resume()
graph.replay()
assert (result == 2).all()
{end}
"""


@pytest.mark.parametrize("end", ["", "torch_memory_saver.pause()"])
def test_a_process_ends_cleanly(end: str) -> None:
    with configure_subprocess():
        run_script(ENDING.format(end=end))
