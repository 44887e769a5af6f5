"""Graphs of torch that are captured through the interface of torch_memory_saver."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sleepbackends.adapters.torch_memory_saver import TorchMemorySaver

from .helpers import GIB, LARGE, SLACK, blocks, drop_caches, free_device_bytes, pattern


@pytest.fixture
def saver() -> Iterator[TorchMemorySaver]:
    saver = TorchMemorySaver()
    yield saver
    saver.backend.close()


@functools.cache
def capture_stream() -> Any:
    """Return the one stream of all captures: torch gives no stream the free memory of another."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def graph_of(saver: TorchMemorySaver, step: Any, **arguments: Any) -> torch.cuda.CUDAGraph:
    """Capture a step that has run before."""
    side = capture_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, stream=side, **arguments):
        step()
    return graph


class Loop:
    """An engine of reinforcement learning: weights, a cache, and one captured step."""

    def __init__(self, saver: TorchMemorySaver, **graph: Any) -> None:
        self.size = LARGE // 4
        with saver.region(tag="weights"):
            self.weight = torch.ones(self.size, device="cuda")
        with saver.region(tag="kv_cache"):
            self.cache = torch.ones(self.size, device="cuda")
        self.given = torch.ones(self.size, device="cuda")
        self.result = torch.zeros((), device="cuda")
        self.graph = graph_of(saver, self.step, tag="cuda_graph", **graph)

    def step(self) -> None:
        intermediate = self.given * self.weight
        self.result.copy_((intermediate + self.cache).mean())

    def generates(self, expected: float, given: float) -> bool:
        self.given.fill_(given)
        self.result.zero_()
        self.graph.replay()
        return self.result.item() == pytest.approx(expected, rel=1e-5)


def test_the_intermediates_of_a_graph_can_be_paused(saver: TorchMemorySaver) -> None:
    loop = Loop(saver)
    assert loop.generates(101, given=100)
    held = saver.backend.state().tags["discard:cuda_graph"].mapped_bytes
    assert held >= LARGE
    free = free_device_bytes()
    saver.pause("cuda_graph")
    assert free_device_bytes() - free > held - SLACK
    saver.resume("cuda_graph")
    assert loop.generates(201, given=200)


def test_graphs_share_the_memory_of_their_pool(saver: TorchMemorySaver) -> None:
    given = torch.full((LARGE // 4,), 2.0, device="cuda")
    sums: list[torch.Tensor] = [torch.zeros((), device="cuda") for _ in range(4)]

    def captures(pool: Any) -> list[torch.cuda.CUDAGraph]:
        graphs = []
        for number, result in enumerate(sums):

            def step(number: int = number, result: torch.Tensor = result) -> None:
                result.copy_((given * (number + 1)).sum() / given.numel())

            graphs.append(graph_of(saver, step, tag=f"graphs {bool(pool)}", pool=pool))
        return graphs

    shared, alone = captures(torch.cuda.graph_pool_handle()), captures(None)
    tags = saver.backend.state().tags
    assert tags["discard:graphs%20True"].mapped_bytes < 2 * LARGE
    assert tags["discard:graphs%20False"].mapped_bytes >= 4 * LARGE
    for graphs in (shared, alone):
        saver.pause()
        saver.resume()
        for graph, result in zip(graphs, sums, strict=True):
            result.zero_()
            graph.replay()
        assert [result.item() for result in sums] == pytest.approx([2, 4, 6, 8], rel=1e-5)


def test_graphs_captured_later_use_the_same_pool_as_long_as_one_lives(
    saver: TorchMemorySaver,
) -> None:
    """Had torch forgotten whose pool it is, it would fill it with memory of its own."""
    pool = torch.cuda.graph_pool_handle()
    for _ in range(2):
        loops = [Loop(saver, pool=pool) for _ in range(2)]
        assert blocks(saver.backend, "discard:cuda_graph") > 0
        saver.pause()
        saver.resume()
        for loop in loops:
            loop.weight.fill_(1)
            loop.cache.fill_(1)
            assert loop.generates(4, given=3)
        del loop
        loops.clear()
        drop_caches()
        assert blocks(saver.backend, "discard:cuda_graph") == 0


def test_a_loop_of_reinforcement_learning(saver: TorchMemorySaver) -> None:
    loop = Loop(saver)
    addresses = [loop.weight.data_ptr(), loop.cache.data_ptr()]
    weight = 1.0
    for _ in range(3):
        loop.cache.fill_(5)
        assert loop.generates(100 * weight + 5, given=100)
        free = free_device_bytes()
        for tag in ("kv_cache", "weights", "cuda_graph"):
            saver.pause(tag)
        assert free_device_bytes() - free > 3 * LARGE - SLACK
        training = pattern(GIB, 1)
        del training
        saver.resume("weights")
        weight += 1
        loop.weight.fill_(weight)
        saver.resume("cuda_graph")
        saver.resume("kv_cache")
        assert not loop.cache.any()
        assert [loop.weight.data_ptr(), loop.cache.data_ptr()] == addresses
