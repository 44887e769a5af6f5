"""The steps that every backend over memory of this process shares."""

from __future__ import annotations

import ctypes
import os
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from sleepbackends.base import BaseBackend, OptionsT
from sleepbackends.errors import HostMemoryError
from sleepbackends.host_limits import host_memory
from sleepbackends.hostmemory import driver
from sleepbackends.hostmemory.adopt import adopt
from sleepbackends.hostmemory.region import Region
from sleepbackends.ledger import Block
from sleepbackends.mechanism import POISON_BYTE, Fill

__all__ = ["HostMemoryBackend"]

Buffer = ctypes.Array[ctypes.c_ubyte]

_POPULATE_BYTES = 64 << 20
"""What one thread populates at a time: zeroing pages is bound by memory, not by calls."""


def usable_cpus() -> int:
    """Return how many processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class HostMemoryBackend(BaseBackend[OptionsT]):
    """A backend whose blocks are page-aligned anonymous memory of this process.

    A subclass says where saved bytes go: ``save``, ``restore`` and ``forget``.

    The address range of a block stays reserved for as long as the block lives; asleep, it
    has no memory and an access faults.
    """

    # What users call

    @contextmanager
    def region(self, tag: str) -> Iterator[Region]:
        """Open a scope that allocates under the tag.

        Raises
        ------
        RequestError
            If the tag is not a proper name.
        """
        region = Region(self, self.open_tag(tag))
        try:
            yield region
        finally:
            region.end()

    def adopt(self, target: Any, tag: str) -> Any:
        """Move existing CPU tensors into memory of this backend; see ``adopt.adopt``.

        Raises
        ------
        RequestError
            If something cannot be moved; nothing changed.
        HostMemoryError
            If there is no room for the copy; nothing changed.
        """
        return adopt(self, target, tag)

    def allocate(
        self, tag: str, size_bytes: int, write: Callable[[memoryview], None] | None = None
    ) -> Buffer:
        """Allocate a block and return a buffer that owns it.

        The block is freed when the last view of the buffer is gone. ``check_room`` is the
        caller's, because it takes longer than a small allocation and may cover many.

        Parameters
        ----------
        tag : str
            The tag, opened before.
        size_bytes : int
            How many bytes; more than 0.
        write : callable, optional
            Gives the block its first contents, before a transition can take it away
            again; without it, it holds zeros.

        Raises
        ------
        HostMemoryError
            If the kernel refuses it.
        Exception
            What ``write`` raises, if it is an error of this package.

        Notes
        -----
        Guarantee: if it raises, nothing was allocated.
        """
        block = self.enter(partial(self._make, tag, size_bytes, write))
        buffer = driver.buffer(block.address, size_bytes)
        # At exit the memory goes with the process; finalizing it then would be too early
        # for whoever still uses it.
        weakref.finalize(buffer, self.free, block.address).atexit = False
        return buffer

    def check_room(self, size_bytes: int) -> None:
        """Check that so much host memory is available now.

        Raises
        ------
        HostMemoryError
            If it is not.
        """
        memory = host_memory()
        if size_bytes > memory.available_bytes:
            raise HostMemoryError(
                f"{size_bytes} bytes of host memory are needed and {memory.available_bytes} "
                f"are available (limited by {memory.source})",
                needed_bytes=size_bytes,
                available_bytes=memory.available_bytes,
                hint="free host memory, raise that limit, or wait for a neighbour: "
                "wait_for_memory_s",
            )

    def _make(self, tag: str, size_bytes: int, write: Callable[[memoryview], None] | None) -> Block:
        mapped_bytes = driver.round_up(size_bytes)
        address = driver.reserve(mapped_bytes)
        try:
            driver.map_memory(address, mapped_bytes)
            if write is not None:
                write(driver.view(address, size_bytes))
        except BaseException:
            driver.release(address, mapped_bytes)
            raise
        return Block(address, size_bytes, tag)

    # The mechanism

    def unmap(self, block: Block) -> None:
        """Give the pages back and keep the address range."""
        driver.unmap_memory(block.address, driver.round_up(block.size_bytes))

    def reserve(self, blocks: Sequence[Block]) -> None:
        """Check that there is memory for all of them; the kernel has no way to set it aside.

        Raises
        ------
        HostMemoryError
            If there is not.
        """
        self.check_room(sum(driver.round_up(block.size_bytes) for block in blocks))

    def map(self, block: Block) -> None:
        """Put memory behind the address again, all of it at once.

        A page that came only when it is touched could be missing then, and the process
        would be killed instead of a resume refused.
        """
        mapped_bytes = driver.round_up(block.size_bytes)
        driver.map_memory(block.address, mapped_bytes)
        try:
            _populate(block.address, mapped_bytes)
        except BaseException:
            self.unmap(block)
            raise

    def fill(self, block: Block, fill: Fill) -> None:
        """Fill a block that was just mapped; the kernel has zeroed it already."""
        if fill is Fill.POISON:
            driver.fill(block.address, driver.round_up(block.size_bytes), POISON_BYTE)

    def release(self, block: Block) -> None:
        """Give back the memory, the saved copy and the address range."""
        self.forget(block)
        driver.release(block.address, driver.round_up(block.size_bytes))

    @abstractmethod
    def forget(self, block: Block) -> None:
        """Drop the saved copy of a block, if there is one; also called for freed blocks."""


def _populate(address: int, size_bytes: int) -> None:
    threads = min(4, usable_cpus(), size_bytes // _POPULATE_BYTES)
    if threads < 2:
        driver.populate(address, size_bytes)
        return
    end = address + size_bytes
    starts = range(address, end, _POPULATE_BYTES)
    sizes = [min(_POPULATE_BYTES, end - start) for start in starts]
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(driver.populate, starts, sizes):
            pass  # only to raise what a thread raised
