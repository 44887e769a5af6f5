"""Which pool torch is told to use when, against a torch that only keeps account."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sleepbackends.cumem.torch_pools import CudaPools
from sleepbackends.vmm.accelerator import Accelerator

Id = tuple[int, int]


class Accounts:
    """The parts of torch that pools need: where a thread allocates, and who holds a pool."""

    def __init__(self) -> None:
        self.holds: Counter[Id] = Counter()
        self.routes: dict[int, list[Id]] = {}
        self.emptied: list[list[Id]] = []
        self.device = 0
        accounts = self

        class MemPool:
            def __init__(self, _: object) -> None:
                self.id: Id = (0, len(accounts.holds) + 1)
                accounts.holds[self.id] += 1

            def use_count(self) -> int:
                if not accounts.holds[self.id]:
                    raise RuntimeError("INTERNAL ASSERT FAILED: forgotten once nobody holds it")
                return accounts.holds[self.id]

        self._C = SimpleNamespace(
            _cuda_customAllocator=lambda *_: object(),
            _cuda_beginAllocateCurrentThreadToPool=self._begin,
            _cuda_endAllocateToPool=lambda device, pool: self.routes[device].remove(pool),
            _cuda_releasePool=self.release,
        )
        self.cuda = SimpleNamespace(
            MemPool=MemPool,
            device=self._device,
            Stream=object,
            stream=contextlib.nullcontext,
            synchronize=lambda: None,
            empty_cache=lambda: self.emptied.append(self.routes.get(self.device, [])[:]),
            graph=SimpleNamespace(default_capture_stream=None),
        )

    def ones(self, *_: object, **__: object) -> object:
        return object()

    def mm(self, *_: object) -> None:
        pass

    def _begin(self, device: int, pool: Id) -> None:
        self.holds[pool] += 1
        self.routes.setdefault(device, []).append(pool)

    def release(self, device: int, pool: Id) -> None:
        assert self.holds[pool] > 0, "released more often than held"
        self.holds[pool] -= 1

    @contextlib.contextmanager
    def _device(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    def where(self, device: int = 0) -> Id | None:
        """The pool that an allocation comes from: torch takes the first."""
        return next(iter(self.routes.get(device, [])), None)


class Space:
    """An address space that nobody asks for memory."""

    alloc_pointer = free_pointer = 0

    @contextlib.contextmanager
    def allocating(self, tag: str) -> Iterator[None]:
        yield


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Accounts:
    accounts = Accounts()
    monkeypatch.setattr(Accelerator, "import_torch", lambda _: accounts)
    return accounts


@pytest.fixture
def pools(torch: Accounts) -> Iterator[CudaPools]:
    space: Any = Space()
    yield CudaPools(space)
    assert not any(torch.routes.values())
    assert not +torch.holds, "somebody still holds a pool"


# Outside of regions


def test_outside_is_outside_of_all_regions_of_the_thread(torch: Accounts, pools: CudaPools) -> None:
    with pools.allocating("outer", 0):
        outer = torch.where()
        with pools.allocating("other device", 1), pools.allocating("inner", 0):
            inside = [torch.where(device) for device in (0, 1)]
            assert None not in inside
            assert inside[0] != outer
            with pools.outside():
                assert [torch.where(device) for device in (0, 1)] == [None, None]
            assert [torch.where(device) for device in (0, 1)] == inside
        assert torch.where() == outer


def test_what_is_freed_outside_is_given_back_before_the_region_goes_on(
    torch: Accounts, pools: CudaPools
) -> None:
    with pools.allocating("outer", 0):
        torch.emptied.clear()
        with pools.outside():
            pass
        assert torch.emptied == [[]], "torch would give nothing back while a region is open"
    torch.emptied.clear()
    with pools.outside():
        pass
    assert torch.emptied == [[]]


def test_a_region_inside_counts_and_ends_there(torch: Accounts, pools: CudaPools) -> None:
    with pools.allocating("outer", 0):
        outer = torch.where()
        with pools.outside():
            with pools.allocating("inner", 0):
                assert torch.where() not in (None, outer)
                with pools.outside():
                    assert torch.where() is None
            assert torch.where() is None
        assert torch.where() == outer


def fail(now: bool = True) -> None:
    _ = 1 / 0 if now else 0


@pytest.mark.parametrize("failing", ["the work", "torch"])
def test_the_region_goes_on_after_an_error(
    torch: Accounts, pools: CudaPools, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    with pools.allocating("outer", 0):
        outer = torch.where()
        with monkeypatch.context() as patch:
            if failing == "torch":
                patch.setattr(torch.cuda, "empty_cache", fail)
            with pytest.raises(ZeroDivisionError), pools.outside():
                fail(failing == "the work")
        assert torch.where() == outer


# Pools of graphs


@contextlib.contextmanager
def captured(
    torch: Accounts, pools: CudaPools, tag: str = "graphs", device: int = 0, **shared: Id | None
) -> Iterator[Id]:
    """Capture a graph, which holds its pool until the end of this scope."""
    with pools.capturing(tag, device, **shared) as pool:
        torch.holds[pool] += 1
    yield pool
    torch.release(device, pool)


def test_graphs_share_a_pool_if_they_are_told_to(torch: Accounts, pools: CudaPools) -> None:
    with (
        captured(torch, pools) as alone,
        captured(torch, pools, shared_as=(0, 70)) as first,
        captured(torch, pools, shared_as=(0, 70)) as second,
        captured(torch, pools, shared_as=(0, 80)) as other,
        captured(torch, pools, tag="more", shared_as=(0, 70)) as of_another_tag,
        captured(torch, pools, device=1, shared_as=(0, 70)) as of_another_device,
    ):
        assert first == second
        assert len({alone, first, other, of_another_tag, of_another_device}) == 5


def test_a_pool_that_was_given_here_stands_for_itself(torch: Accounts, pools: CudaPools) -> None:
    with captured(torch, pools) as first, captured(torch, pools, shared_as=first) as second:
        assert first == second
    with (
        captured(torch, pools, shared_as=(0, 70)) as first,
        captured(torch, pools, shared_as=first) as second,
    ):
        assert first == second


def test_a_pool_lives_as_long_as_a_graph_in_it(torch: Accounts, pools: CudaPools) -> None:
    """After that torch would fill it with memory of its own."""
    with captured(torch, pools, shared_as=(0, 70)) as first:
        with captured(torch, pools, shared_as=(0, 70)) as second:
            assert second == first
        with captured(torch, pools, shared_as=(0, 70)) as third:
            assert third == first
    with captured(torch, pools, shared_as=(0, 70)) as later:
        assert later != first


def test_a_pool_stays_while_a_capture_in_it_goes_on(torch: Accounts, pools: CudaPools) -> None:
    """The graphs that held it may go at any moment."""
    with contextlib.ExitStack() as scope:
        first = scope.enter_context(captured(torch, pools, shared_as=(0, 70)))
        with pools.capturing("graphs", 0, (0, 70)) as pool:
            scope.close()
            assert torch.holds[pool] == 1
            assert pool == first


def test_a_capture_that_fails_holds_nothing(torch: Accounts, pools: CudaPools) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), pools.capturing("graphs", 0, (0, 70)):
            _ = 1 / 0
    with (
        captured(torch, pools, shared_as=(0, 70)),
        pytest.raises(ZeroDivisionError),
        pools.capturing("graphs", 0, (0, 70)),
    ):
        _ = 1 / 0
