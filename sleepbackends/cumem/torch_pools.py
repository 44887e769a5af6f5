"""Route what torch allocates in a scope to the address space; the only module that knows torch.

Each scope has a pool of its own that ends with it. Memory freed inside a live pool can
neither be released nor used by another (https://github.com/pytorch/pytorch/issues/145168);
of a pool that has ended, torch releases what is free whenever its cache is emptied, and
what is in use stays until it is freed.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sleepbackends.cumem.scopes import Scopes
from sleepbackends.errors import UnsupportedOperationError
from sleepbackends.vmm.address_space import AddressSpace

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class TorchPools:
    """Scopes in which torch allocates from an address space.

    Parameters
    ----------
    space : AddressSpace
        Where memory comes from.
    """

    def __init__(self, space: AddressSpace) -> None:
        self._space = space
        self._allocator: Any = None
        self._open = threading.local()
        self._shared: dict[tuple[tuple[int, int], str, int], Any] = {}
        self._expandable = _ExpandableSegments()
        self.scopes = Scopes()

    @contextmanager
    def allocating(self, tag: str, device: int) -> Iterator[None]:
        """Let everything that this thread allocates on the device carry the tag.

        Scopes nest: the innermost one counts.

        Raises
        ------
        UnsupportedOperationError
            If torch is missing or was built without CUDA.
        """
        torch = import_torch()
        with self.scopes.open(), torch.cuda.device(device):
            _warm_up(torch)
            try:
                with (
                    self._pool(torch, device) as pool,
                    self._expandable.off(torch),
                    self._space.allocating(tag),
                    self._routing(torch, device, pool.id),
                ):
                    yield
            finally:
                # What was freed inside goes back now, unless another scope is open.
                torch.cuda.empty_cache()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Let what this thread allocates be torch's own, whatever scopes are open in it.

        Raises
        ------
        UnsupportedOperationError
            If torch is missing or was built without CUDA.
        """
        torch = import_torch()
        stack = self._stack()
        # The innermost of each device is the one that is not suspended.
        routed = dict(stack)
        for device, pool_id in routed.items():
            torch._C._cuda_endAllocateToPool(device, pool_id)
        self._open.stack = []
        try:
            yield
        finally:
            try:
                # Before the scopes go on: torch gives nothing back while one is open.
                torch.cuda.empty_cache()
            finally:
                self._open.stack = stack
                for device, pool_id in routed.items():
                    _route_again(torch, device, pool_id)

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
        torch = import_torch()
        with self.scopes.open(), torch.cuda.device(device):
            graph = torch.cuda.graph
            if graph.default_capture_stream is None:
                # Made here as torch makes it at the first capture.
                graph.default_capture_stream = torch.cuda.Stream()
            with torch.cuda.stream(graph.default_capture_stream):
                _warm_up(torch)
            torch.cuda.synchronize()
            with (
                self._capture_pool(torch, tag, device, shared_as) as pool,
                self._expandable.off(torch),
                self._space.allocating(tag),
            ):
                yield pool.id

    @contextmanager
    def _capture_pool(
        self, torch: Any, tag: str, device: int, shared_as: tuple[int, int] | None
    ) -> Iterator[Any]:
        pool = self._shared.get((shared_as, tag, device)) if shared_as is not None else None
        if pool is None or not pool.use_count():
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

    @contextmanager
    def _pool(self, torch: Any, device: int) -> Iterator[Any]:
        pool = torch.cuda.MemPool(self._torch_allocator(torch))
        # Its destructor ends the process while any scope or capture is open on the device,
        # in whatever thread (torch 2.11), so it never runs: a few bytes for each scope. What
        # it would have released is released here.
        _keep_for_ever(pool)
        try:
            yield pool
        finally:
            torch._C._cuda_releasePool(device, pool.id)

    @contextmanager
    def _routing(self, torch: Any, device: int, pool_id: tuple[int, int]) -> Iterator[None]:
        # torch asks the scopes of a thread in the order in which they were opened, so an
        # outer one on the same device is suspended while an inner one is open.
        stack = self._stack()
        outer = next((each for each in reversed(stack) if each[0] == device), None)
        if outer is not None:
            torch._C._cuda_endAllocateToPool(*outer)
        torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool_id)
        stack.append((device, pool_id))
        try:
            yield
        finally:
            stack.pop()
            torch._C._cuda_endAllocateToPool(device, pool_id)
            torch._C._cuda_releasePool(device, pool_id)
            if outer is not None:
                _route_again(torch, *outer)

    def _stack(self) -> list[tuple[int, tuple[int, int]]]:
        stack: list[tuple[int, tuple[int, int]]] = self._open.__dict__.setdefault("stack", [])
        return stack

    def _torch_allocator(self, torch: Any) -> Any:
        if self._allocator is None:
            self._allocator = torch._C._cuda_customAllocator(
                self._space.alloc_pointer, self._space.free_pointer
            )
            # torch keeps a plain pointer to it for as long as any segment lives.
            _keep_for_ever(self._allocator)
        return self._allocator


def _route_again(torch: Any, device: int, pool_id: tuple[int, int]) -> None:
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool_id)
    # Beginning once more also held it once more.
    torch._C._cuda_releasePool(device, pool_id)


def _keep_for_ever(thing: object) -> None:
    # A list of them would be emptied, and their destructors run, when the interpreter ends.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _warm_up(torch: Any) -> None:
    """Have cuBLAS take its workspace for this thread and stream outside of the scope.

    torch keeps it for good. Taken at the first product inside a scope it would carry the
    tag, and be missing from every later product while that tag sleeps.
    """
    one = torch.ones((1, 1), device="cuda")
    torch.mm(one, one)


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


def import_torch() -> Any:
    """Import torch with CUDA.

    Raises
    ------
    UnsupportedOperationError
        If it is missing or was built without CUDA.
    """
    try:
        import torch
    except ImportError as error:
        raise UnsupportedOperationError(
            "torch is not installed", hint="pip install 'sleepbackends[torch]'"
        ) from error
    if not torch.cuda.is_available():
        raise UnsupportedOperationError(
            "torch sees no CUDA device", hint="install a CUDA build of torch"
        )
    return torch
