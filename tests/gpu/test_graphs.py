"""Captured CUDA graphs replay correctly after their memory was away."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.policies import Policies, Policy, TagPolicy

from .helpers import LARGE, MIB, blocks, drop_caches

SIDE = 512


class Captured:
    """A graph that reads weights, reads and writes a cache, and has intermediates."""

    def __init__(self, backend: CumemBackend, in_tagged_pool: bool) -> None:
        with backend.region("weights"):
            self.weight = torch.randn(SIDE, SIDE, device="cuda")
        with backend.region("kv_cache"):
            self.cache = torch.zeros(SIDE, SIDE, device="cuda")
        self.given = torch.zeros(SIDE, SIDE, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        on_the_side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        on_the_side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(on_the_side):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(on_the_side)
        scope: Any = backend.graph_pool("cuda_graph") if in_tagged_pool else nullcontext()
        # On the stream that is warm: what libraries allocate once for a stream is there already.
        with scope as pool, torch.cuda.graph(self.graph, pool=pool, stream=on_the_side):
            self.result = self._step()
        self.set_inputs(0)

    def _step(self) -> torch.Tensor:
        self.cache.add_(self.given)
        hidden = torch.relu(self.given @ self.weight)
        return (hidden @ self.weight + self.cache).cumsum(0)

    def set_inputs(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.given.copy_(torch.randn(SIDE, SIDE))
        self.cache.copy_(torch.randn(SIDE, SIDE))

    def replay(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What one replay makes of inputs of a seed: its result, and the cache."""
        self.set_inputs(seed)
        self.result.fill_(-1)
        self.graph.replay()
        torch.cuda.synchronize()
        return self.result.cpu(), self.cache.cpu()


def suspend(backend: CumemBackend) -> None:
    assert backend.suspend(1).changed
    assert backend.state().mapped_bytes == 0
    backend.resume()


def discard_cache(backend: CumemBackend) -> None:
    assert backend.discard(["kv_cache"]).changed
    backend.resume()


def discard_intermediates(backend: CumemBackend) -> None:
    assert backend.discard(["cuda_graph"]).changed
    backend.resume()


CASES = [
    (suspend, False),
    (suspend, True),
    (discard_cache, False),
    (discard_cache, True),
    (discard_intermediates, True),
]


@pytest.mark.parametrize(("cycle", "in_tagged_pool"), CASES)
def test_a_graph_replays(
    backend: CumemBackend, cycle: Callable[[CumemBackend], None], in_tagged_pool: bool
) -> None:
    captured = Captured(backend, in_tagged_pool)
    if in_tagged_pool:
        assert backend.is_managed(captured.result.data_ptr())
    expected = {seed: captured.replay(seed) for seed in range(3)}
    assert not torch.equal(expected[0][0], expected[1][0])
    for _ in range(3):
        cycle(backend)
        for seed, (result, cache) in expected.items():
            again = captured.replay(seed)
            assert torch.equal(again[0], result)
            assert torch.equal(again[1], cache)


def test_what_the_graph_reads_is_what_was_saved(backend: CumemBackend) -> None:
    """Without new inputs: the weights, the inputs and the cache come from the copy."""
    policies = Policies({"kv_cache": TagPolicy(Policy.OFFLOAD, Policy.OFFLOAD)})
    captured = Captured(backend, in_tagged_pool=True)
    captured.set_inputs(5)
    expected = captured.replay(5)[0]
    captured.set_inputs(5)
    backend.suspend(1, policies=policies)
    backend.resume()
    captured.graph.replay()
    assert torch.equal(captured.result.cpu(), expected)


def test_several_graphs_share_a_tagged_pool_and_go_with_their_memory(
    backend: CumemBackend,
) -> None:
    given = torch.full((LARGE // 4,), 2.0, device="cuda")
    graphs, results = [], []
    pool: Any
    with backend.graph_pool("cuda_graph") as pool:
        for factor in (3, 5):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                results.append(given * factor)
            graphs.append(graph)
    outside = torch.ones(LARGE // 4, device="cuda")
    assert not backend.is_managed(outside.data_ptr())
    assert backend.state().tags["cuda_graph"].mapped_bytes >= 2 * LARGE
    backend.suspend(1)
    backend.resume()
    for graph, result, value in zip(graphs, results, (6, 10), strict=True):
        graph.replay()
        torch.cuda.synchronize()
        assert (result == value).all()
    del graph, result
    graphs.clear()
    results.clear()
    drop_caches()
    assert blocks(backend, "cuda_graph") == 0


def test_a_graph_may_go_while_it_is_asleep(backend: CumemBackend) -> None:
    captured = Captured(backend, in_tagged_pool=True)
    with backend.region("weights"):
        kept = torch.full((MIB,), 7, device="cuda")
    backend.suspend(1)
    del captured
    drop_caches()
    assert blocks(backend, "cuda_graph") == 0
    backend.resume()
    assert (kept == 7).all()
