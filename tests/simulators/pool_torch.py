"""As much of torch's allocator as regions need, over a simulated driver.

Every allocation is a segment of its own, asked for through the pool that the thread allocates
from, and given back as soon as its tensor is gone.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

PoolId = tuple[int, int]

_ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class Tensor:
    """A tensor of bytes on the device, that frees its memory when it goes."""

    def __init__(self, pool: Pool | None, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._pool = pool
        self.address = 0
        if pool is not None:
            self.address = pool.allocate(size_bytes)

    def data_ptr(self) -> int:
        return self.address

    def __del__(self) -> None:
        if self._pool is not None and self.address:
            self._pool.free(self.address, self.size_bytes)


class Pool:
    """A pool over an allocator of somebody else's."""

    numbers = itertools.count(1)

    def __init__(self, allocator: tuple[Any, Any]) -> None:
        self.id: PoolId = (0, next(Pool.numbers))
        self._allocator = allocator
        self.users = 1

    def use_count(self) -> int:
        return self.users

    def allocate(self, size_bytes: int) -> int:
        address: int | None = self._allocator[0](size_bytes, 0, None)
        if address is None:
            raise torch.OutOfMemoryError(f"{size_bytes} bytes")
        return address

    def free(self, address: int, size_bytes: int) -> None:
        self._allocator[1](address, size_bytes, 0, None)


def _callbacks(alloc: int, free: int) -> tuple[Any, Any]:
    return _ALLOC(alloc), _FREE(free)


class PoolTorch:
    """Stands for the module ``torch`` with one device of a kind, without kernels."""

    uint8 = torch.uint8
    OutOfMemoryError = torch.OutOfMemoryError

    def __init__(self, kind: str = "cuda") -> None:
        self._pools: dict[PoolId, Pool] = {}
        self._open = threading.local()
        self.emptied = 0
        of_kind = SimpleNamespace(
            MemPool=self._make_pool,
            Stream=object,
            current_device=lambda: 0,
            device=self._scope,
            empty_cache=self._empty_cache,
            graph=SimpleNamespace(default_capture_stream=None),
            is_available=lambda: True,
            stream=self._scope,
            synchronize=lambda *_: None,
        )
        setattr(self, kind, of_kind)
        internals: dict[str, Any] = {
            "beginAllocateCurrentThreadToPool": self._begin,
            "customAllocator": _callbacks,
            "endAllocateToPool": self._end,
            "releasePool": self._release,
        }
        self._C: Any = SimpleNamespace(
            _accelerator_setAllocatorSettings=lambda _: None,
            **{f"_{kind}_{name}": function for name, function in internals.items()},
        )

    def empty(self, size: int, **_: object) -> Tensor:
        """Allocate bytes: in the innermost pool of this thread, or in no device memory at all."""
        stack = self._stack()
        return Tensor(self._pools[stack[-1]] if stack else None, size)

    def capture(self, pool_id: PoolId, size: int) -> Tensor:
        """Allocate bytes as a capture into this pool does, which holds the pool for good."""
        self._pools[pool_id].users += 1
        return Tensor(self._pools[pool_id], size)

    def ones(self, *_: object, **__: object) -> None: ...

    def mm(self, *_: object) -> None: ...

    def _stack(self) -> list[PoolId]:
        stack: list[PoolId] = self._open.__dict__.setdefault("stack", [])
        return stack

    def _make_pool(self, allocator: tuple[Any, Any]) -> Pool:
        pool = Pool(allocator)
        self._pools[pool.id] = pool
        return pool

    def _begin(self, device: int, pool_id: PoolId) -> None:
        self._pools[pool_id].users += 1
        self._stack().append(pool_id)

    def _end(self, device: int, pool_id: PoolId) -> None:
        self._stack().remove(pool_id)

    def _release(self, device: int, pool_id: PoolId) -> None:
        self._pools[pool_id].users -= 1

    def _empty_cache(self) -> None:
        self.emptied += 1

    @contextmanager
    def _scope(self, _: object) -> Iterator[None]:
        yield
