"""Pools of torch on CUDA devices, and those that graphs are captured into."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sleepbackends.cumem.accelerator import CUDA
from sleepbackends.vmm.address_space import AddressSpace
from sleepbackends.vmm.torch_pools import TorchPools

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class CudaPools(TorchPools):
    """Scopes in which torch allocates from an address space, or captures graphs into it."""

    accelerator = CUDA

    def __init__(self, space: AddressSpace) -> None:
        super().__init__(space)
        self._shared: dict[tuple[tuple[int, int], str, int], Any] = {}
        self._expandable = _ExpandableSegments()

    def _settings(self, torch: Any) -> AbstractContextManager[None]:
        return self._expandable.off(torch)

    def _warm_up(self, torch: Any) -> None:
        """Have cuBLAS take its workspace for this thread and stream outside of the scope.

        torch keeps it for good. Taken at the first product inside a scope it would carry the
        tag, and be missing from every later product while that tag sleeps.
        """
        one = torch.ones((1, 1), device="cuda")
        torch.mm(one, one)

    @contextmanager
    def capturing(
        self, tag: str, device: int, shared_as: tuple[int, int] | None = None
    ) -> Iterator[tuple[int, int]]:
        """Give a pool for the capture of graphs whose memory carries the tag.

        Captures for the same ``shared_as`` get the same pool while a graph of an earlier one
        lives.

        On another stream than torch's own for captures, run what is captured once before,
        as torch asks for anyway: what libraries keep of a capture would carry the tag.

        Yields
        ------
        pool_id : tuple of int
            For ``torch.cuda.graph(graph, pool=pool_id)``.
        """
        torch = self.accelerator.import_torch()
        with self.scopes.open(), torch.cuda.device(device):
            graph = torch.cuda.graph
            if graph.default_capture_stream is None:
                # Made here as torch makes it at the first capture.
                graph.default_capture_stream = torch.cuda.Stream()
            with torch.cuda.stream(graph.default_capture_stream):
                self._warm_up(torch)
            torch.cuda.synchronize()
            with (
                self._capture_pool(torch, tag, device, shared_as) as pool,
                self._settings(torch),
                self._space.allocating(tag),
            ):
                yield pool.id

    @contextmanager
    def _capture_pool(
        self, torch: Any, tag: str, device: int, shared_as: tuple[int, int] | None
    ) -> Iterator[Any]:
        pool = self._shared.get((shared_as, tag, device)) if shared_as is not None else None
        if pool is None or not _is_used(pool):
            # Torch forgets the allocator of a pool that nobody uses.
            with self._pool(torch, device) as pool:
                for name in {shared_as or pool.id, pool.id}:
                    self._shared[name, tag, device] = pool
                yield pool
            return
        # Held until the graph that is being captured holds it.
        torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool.id)
        torch._C._cuda_endAllocateToPool(device, pool.id)
        try:
            yield pool
        finally:
            torch._C._cuda_releasePool(device, pool.id)


def _is_used(pool: Any) -> bool:
    """Tell whether a graph holds a pool."""
    try:
        return bool(pool.use_count())
    except RuntimeError:
        # What torch 2.11 says of a pool that it has forgotten.
        return False


class _ExpandableSegments:
    """Turns expandable segments off for a while and keeps every other setting.

    With them on, torch maps memory itself and a pool's allocator is never asked
    (https://github.com/vllm-project/vllm/pull/40812). Torch resets each setting that is missing
    from the text it is given, so all of them are written back.
    """

    _lock = threading.Lock()
    _users = 0

    @contextmanager
    def off(self, torch: Any) -> Iterator[None]:
        settings = next((os.environ[name] for name in _SETTINGS if os.environ.get(name)), "")
        others = [
            part for part in _split(settings) if not part.strip().startswith("expandable_segments:")
        ]
        if len(others) == len(_split(settings)):
            yield
            return
        cls = type(self)
        with cls._lock:
            cls._users += 1
            if cls._users == 1:
                _apply(torch, ",".join([*others, "expandable_segments:False"]))
        try:
            yield
        finally:
            with cls._lock:
                cls._users -= 1
                if not cls._users:
                    _apply(torch, settings)


def _split(settings: str) -> list[str]:
    return [part for part in settings.split(",") if part.strip()]


def _apply(torch: Any, settings: str) -> None:
    torch._C._accelerator_setAllocatorSettings(settings)
