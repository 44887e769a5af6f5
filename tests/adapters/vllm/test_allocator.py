"""The allocator as code written for vLLM's uses it directly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sleepbackends.adapters.vllm.allocator import Allocator
from sleepbackends.adapters.vllm.choice import PLUGIN, configuration
from sleepbackends.adapters.vllm.memory import Memory
from sleepbackends.errors import ClosedError, UnknownTagError, UnsupportedOperationError
from sleepbackends.residency import Residency
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.cuda import Simulator
from tests.simulators.pool_torch import PoolTorch, Tensor

SIZE = 2 * GRANULE_BYTES


@pytest.fixture
def allocator(torch: PoolTorch, simulator: Simulator) -> Iterator[Allocator]:
    yield from opened({})


def opened(environ: dict[str, str]) -> Iterator[Allocator]:
    from sleepbackends.cumem.driver import CudaDriver

    CudaDriver()
    config = configuration(PLUGIN, {"SLEEPBACKENDS_BACKEND": "cumem", **environ})
    allocator = Allocator(Memory.open(config))
    yield allocator
    allocator.close()


def filled(allocator: Allocator, torch: PoolTorch, tag: str | None, byte: int) -> Tensor:
    with allocator.use_memory_pool(tag=tag):
        tensor = torch.empty(SIZE)
    backend(allocator).cuda.write(tensor.address, bytes([byte]) * SIZE, 0)
    return tensor


def backend(allocator: Allocator) -> Any:
    return allocator.memory.orchestrator.backend


def residency(allocator: Allocator, tag: str) -> Residency:
    (only,) = allocator.memory.orchestrator.backend.state().tags[tag].residencies
    return only


def content(allocator: Allocator, tensor: Tensor) -> bytes:
    read: bytes = backend(allocator).cuda.read(tensor.address, SIZE, 0)
    return read


def test_nothing_is_used_at_first(allocator: Allocator, torch: PoolTorch) -> None:
    assert allocator.get_current_usage() == 0
    tensor = filled(allocator, torch, "weights", 1)
    assert allocator.get_current_usage() == SIZE
    allocator.sleep("weights")
    assert allocator.get_current_usage() == SIZE, "asleep it is still allocated"
    del tensor
    assert allocator.get_current_usage() == 0


@pytest.mark.parametrize(
    ("offloaded", "kept"),
    [
        (("weights",), {"weights"}),
        ("kv_cache", {"kv_cache"}),
        (("weights", "kv_cache", "mine"), {"weights", "kv_cache", "mine"}),
        ((), set()),
        (None, {"default"}),
    ],
)
def test_sleeping_keeps_the_named_tags(
    allocator: Allocator, torch: PoolTorch, offloaded: tuple[str, ...] | None, kept: set[str]
) -> None:
    tags = ["weights", "kv_cache", "mine", "default"]
    tensors = {
        tag: filled(allocator, torch, None if tag == "default" else tag, 10 + i)
        for i, tag in enumerate(tags)
    }
    allocator.sleep(offloaded)
    for tag in tags:
        expected = Residency.OFFLOADED if tag in kept else Residency.DISCARDED
        assert residency(allocator, tag) is expected
    allocator.wake_up()
    for i, tag in enumerate(tags):
        byte = 10 + i if tag in kept else 0
        assert content(allocator, tensors[tag]) == bytes([byte]) * SIZE


def test_what_the_configuration_keeps_stays_resident(
    torch: PoolTorch, simulator: Simulator
) -> None:
    for allocator in opened({"SLEEPBACKENDS_POLICIES__MINE": "keep"}):
        mine, weights = (filled(allocator, torch, tag, 1) for tag in ("mine", "weights"))
        allocator.sleep(("weights",))
        assert residency(allocator, "mine") is Residency.RESIDENT
        assert residency(allocator, "weights") is Residency.OFFLOADED
        allocator.wake_up()
        assert content(allocator, mine) == content(allocator, weights)


def test_vllm_s_tags_are_known_before_there_is_memory(allocator: Allocator) -> None:
    """An engine may have no KV cache, or have it elsewhere."""
    for tags in (["weights"], ["kv_cache"], ["kv_cache", "weights"]):
        allocator.wake_up(tags)
        allocator.discard(tags)


def test_several_pools_of_a_tag(allocator: Allocator, torch: PoolTorch) -> None:
    tensors = [filled(allocator, torch, "weights", byte) for byte in (1, 2, 3)]
    with allocator.use_memory_pool("runtime"):
        outer = torch.empty(SIZE)
        with allocator.use_memory_pool("kv_cache"):
            inner = torch.empty(SIZE)
        after = torch.empty(SIZE)
    tags = allocator.memory.status()["tags"]
    assert {tag: tags[tag]["resident_bytes"] for tag in ("weights", "runtime", "kv_cache")} == {
        "weights": 3 * SIZE,
        "runtime": 2 * SIZE,
        "kv_cache": SIZE,
    }
    allocator.sleep(("weights",))
    allocator.wake_up(["weights"])
    assert [content(allocator, tensor)[:1] for tensor in tensors] == [b"\x01", b"\x02", b"\x03"]
    assert residency(allocator, "runtime") is Residency.UNDEFINED, "it cannot be deferred"
    assert residency(allocator, "kv_cache") is Residency.DISCARDED
    del outer, inner, after


def test_discarding(
    allocator: Allocator, torch: PoolTorch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = filled(allocator, torch, "weights", 1)
    kv_cache = filled(allocator, torch, "kv_cache", 2)
    allocator.discard("kv_cache")
    allocator.discard(("kv_cache",))
    assert content(allocator, weights) == b"\x01" * SIZE
    allocator.sleep(("weights", "kv_cache"))
    assert "kv_cache is asleep already and stays discarded" in caplog.text
    allocator.wake_up(["kv_cache"])
    assert content(allocator, kv_cache) == bytes(SIZE)
    assert residency(allocator, "weights") is Residency.OFFLOADED
    for call in (allocator.discard, allocator.wake_up):
        with pytest.raises(UnknownTagError):
            call(["no_such"])
    allocator.wake_up()
    assert content(allocator, weights) == b"\x01" * SIZE


def test_torch_gives_back_what_it_keeps_before_memory_moves(
    allocator: Allocator, torch: PoolTorch
) -> None:
    tensor = filled(allocator, torch, "weights", 1)
    before = torch.emptied
    allocator.sleep("weights")
    assert torch.emptied > before
    before = torch.emptied
    allocator.wake_up()
    assert torch.emptied > before
    assert content(allocator, tensor) == b"\x01" * SIZE


def test_a_closed_one_says_so(allocator: Allocator) -> None:
    allocator.release_pools()
    allocator.release_pools()
    assert allocator.memory.closed
    for call in (allocator.sleep, allocator.wake_up):
        with pytest.raises(ClosedError):
            call()


def test_a_backend_without_pools_for_graphs(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(type(backend(allocator)), "graph_pool")
    assert not allocator.memory.has_graph_pool
    with pytest.raises(UnsupportedOperationError, match="no pool"), allocator.cudagraph_pool():
        raise AssertionError("there is none")
