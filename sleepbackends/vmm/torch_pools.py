"""Route what torch allocates in a scope to the address space; the only module that knows pools.

Each scope has a pool of its own that ends with it. Memory freed inside a live pool can
neither be released nor used by another (https://github.com/pytorch/pytorch/issues/145168);
of a pool that has ended, torch releases what is free whenever its cache is emptied, and
what is in use stays until it is freed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from sleepbackends.vmm.accelerator import Accelerator
from sleepbackends.vmm.address_space import AddressSpace
from sleepbackends.vmm.scopes import Scopes


class TorchPools:
    """Scopes in which torch allocates from an address space.

    Parameters
    ----------
    space : AddressSpace
        Where memory comes from.
    """

    accelerator: Accelerator
    """The kind of device."""

    def __init__(self, space: AddressSpace) -> None:
        self._space = space
        self._allocator: Any = None
        self._open = threading.local()
        self.scopes = Scopes()

    @contextmanager
    def allocating(self, tag: str, device: int) -> Iterator[None]:
        """Let everything that this thread allocates on the device carry the tag.

        Scopes nest: the innermost one counts.

        Raises
        ------
        UnsupportedOperationError
            If torch is missing or was built without such devices.
        """
        torch = self.accelerator.import_torch()
        of_kind = self.accelerator.of(torch)
        with self.scopes.open(), of_kind.device(device):
            self._warm_up(torch)
            try:
                with (
                    self._pool(torch, device) as pool,
                    self._settings(torch),
                    self._space.allocating(tag),
                    self._routing(torch, device, pool.id),
                ):
                    yield
            finally:
                # What was freed inside goes back now, unless another scope is open.
                of_kind.empty_cache()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Let what this thread allocates be torch's own, whatever scopes are open in it.

        Raises
        ------
        UnsupportedOperationError
            If torch is missing or was built without such devices.
        """
        torch = self.accelerator.import_torch()
        stack = self._stack()
        # The innermost of each device is the one that is not suspended.
        routed = dict(stack)
        for device, pool_id in routed.items():
            self._call(torch, "endAllocateToPool", device, pool_id)
        self._open.stack = []
        try:
            yield
        finally:
            try:
                # Before the scopes go on: torch gives nothing back while one is open.
                self.accelerator.of(torch).empty_cache()
            finally:
                self._open.stack = stack
                for device, pool_id in routed.items():
                    self._route_again(torch, device, pool_id)

    def _warm_up(self, torch: Any) -> None:
        """Have libraries take what they keep for good outside of the scope that begins."""

    def _settings(self, torch: Any) -> AbstractContextManager[None]:
        """Change settings of torch's allocator for as long as a pool is used."""
        return nullcontext()

    @contextmanager
    def _pool(self, torch: Any, device: int) -> Iterator[Any]:
        pool = self.accelerator.of(torch).MemPool(self._torch_allocator(torch))
        # Its destructor ends the process while any scope or capture is open on the device,
        # in whatever thread (torch 2.11), so it never runs: a few bytes for each scope. What
        # it would have released is released here.
        _keep_for_ever(pool)
        try:
            yield pool
        finally:
            self._call(torch, "releasePool", device, pool.id)

    @contextmanager
    def _routing(self, torch: Any, device: int, pool_id: tuple[int, int]) -> Iterator[None]:
        # torch asks the scopes of a thread in the order in which they were opened, so an
        # outer one on the same device is suspended while an inner one is open.
        stack = self._stack()
        outer = next((each for each in reversed(stack) if each[0] == device), None)
        if outer is not None:
            self._call(torch, "endAllocateToPool", *outer)
        self._call(torch, "beginAllocateCurrentThreadToPool", device, pool_id)
        stack.append((device, pool_id))
        try:
            yield
        finally:
            stack.pop()
            self._call(torch, "endAllocateToPool", device, pool_id)
            self._call(torch, "releasePool", device, pool_id)
            if outer is not None:
                self._route_again(torch, *outer)

    def _route_again(self, torch: Any, device: int, pool_id: tuple[int, int]) -> None:
        self._call(torch, "beginAllocateCurrentThreadToPool", device, pool_id)
        # Beginning once more also held it once more.
        self._call(torch, "releasePool", device, pool_id)

    def _stack(self) -> list[tuple[int, tuple[int, int]]]:
        stack: list[tuple[int, tuple[int, int]]] = self._open.__dict__.setdefault("stack", [])
        return stack

    def _torch_allocator(self, torch: Any) -> Any:
        if self._allocator is None:
            self._allocator = self._call(
                torch, "customAllocator", self._space.alloc_pointer, self._space.free_pointer
            )
            # torch keeps a plain pointer to it for as long as any segment lives.
            _keep_for_ever(self._allocator)
        return self._allocator

    def _call(self, torch: Any, name: str, *arguments: Any) -> Any:
        return self.accelerator.internal(torch, name)(*arguments)


def _keep_for_ever(thing: object) -> None:
    # A list of them would be emptied, and their destructors run, when the interpreter ends.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
