"""Several devices in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import pytest
import torch

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.policies import Policies, Policy, TagPolicy

from .helpers import GIB, LARGE, SLACK, free_device_bytes, holds, pattern, tag_of

KEEP = TagPolicy(Policy.KEEP, Policy.KEEP)
TAGS = ("on0", "on1")


@pytest.fixture(autouse=True)
def needs_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def test_tags_on_one_device_are_independent_of_the_other(backend: CumemBackend) -> None:
    tensors = []
    for device, tag in enumerate(TAGS):
        with backend.region(tag, device):
            tensors.append(pattern(LARGE, device, device))
    first, second = tensors
    assert [tag_of(backend, tensor) for tensor in tensors] == list(TAGS)
    free = free_device_bytes(0)
    backend.discard(["on1"])
    assert holds(first, 0)
    assert abs(free_device_bytes(0) - free) < SLACK
    backend.resume()
    assert not second.any()
    second.copy_(pattern(LARGE, 5, 1))
    backend.suspend(1, policies=Policies({"on1": KEEP}))
    assert backend.state().asleep_tags() == {"on0"}
    assert holds(second, 5)
    backend.resume()
    assert holds(first, 0)


def test_one_tag_may_have_memory_on_both(backend: CumemBackend) -> None:
    with backend.region("weights", 0):
        first = pattern(LARGE, 1, 0)
        with backend.region("weights", 1):
            second = pattern(LARGE, 2, 1)
            outer = pattern(LARGE, 3, 0)
    with backend.region("weights", 1):
        elsewhere = pattern(LARGE, 4, 0)
    tags = [tag_of(backend, tensor) for tensor in (first, second, outer, elsewhere)]
    assert tags == ["weights", "weights", "weights", None]
    assert torch.cuda.current_device() == 0
    free = [free_device_bytes(device) for device in (0, 1)]
    backend.suspend(1)
    assert free_device_bytes(0) - free[0] > 2 * LARGE - SLACK
    assert free_device_bytes(1) - free[1] > LARGE - SLACK
    backend.resume()
    assert all(holds(t, seed) for t, seed in ((first, 1), (second, 2), (outer, 3), (elsewhere, 4)))


def test_both_links_are_busy_at_once(backend: CumemBackend) -> None:
    """Twice the bytes over two links take little longer than once the bytes over one."""
    count, size_bytes = 16, GIB // 4
    tensors = []
    for device, tag in enumerate(TAGS):
        with backend.region(tag, device):
            tensors += [pattern(size_bytes, seed, device) for seed in range(count)]
    # The first sleep makes pinned memory ready for all that follow.
    backend.suspend(1)
    backend.resume()
    alone, together = [], []
    for _ in range(5):
        for awake, asleep in (TAGS, TAGS[::-1]):
            policies = Policies({awake: KEEP})
            down = seconds(partial(backend.suspend, 1, policies=policies))
            up = seconds(partial(backend.resume, [asleep]))
            alone.append((down, up))
        together.append((seconds(partial(backend.suspend, 1)), seconds(backend.resume)))
    for direction in (0, 1):
        one = median(pair[direction] for pair in alone)
        both = median(pair[direction] for pair in together)
        assert 2 * one / both >= 1.8, (direction, one, both)
    assert all(holds(tensor, index % count) for index, tensor in enumerate(tensors))
