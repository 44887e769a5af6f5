from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.availability import Availability
from sleepbackends.capabilities import Capabilities
from sleepbackends.control import Control
from sleepbackends.hostmemory import driver
from sleepbackends.hostmemory.backend import HostMemoryBackend
from sleepbackends.ledger import Block

PAGE = mmap.PAGESIZE


class InMemory(HostMemoryBackend[Any]):
    """The smallest backend over host memory: saved bytes are ``bytes`` objects."""

    name = "in-memory"
    capabilities = Capabilities(
        supports_selective_release=True,
        supports_selective_resume=True,
        supports_offload=True,
        preserves_addresses=True,
        owns_allocations=True,
    )

    def __init__(self) -> None:
        super().__init__()
        self.saved: dict[int, bytes] = {}

    @classmethod
    def probe(cls) -> Availability:
        return Availability(True)

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        for block in blocks:
            self.saved[block.address] = bytes(driver.view(block.address, block.size_bytes))
            control.advance(block.size_bytes)
            yield block

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        for block in blocks:
            driver.view(block.address, block.size_bytes)[:] = self.saved[block.address]
            control.advance(block.size_bytes)
            yield block

    def forget(self, block: Block) -> None:
        self.saved.pop(block.address, None)


@pytest.fixture
def backend() -> Iterator[InMemory]:
    backend = InMemory()
    yield backend
    backend.close()


def count_blocks(backend: HostMemoryBackend[Any], tag: str = "weights") -> int:
    state = backend.state().tags.get(tag)
    return state.blocks if state else 0


def resident_bytes(address: int, size_bytes: int) -> int:
    """How much of a range is in memory, page by page, as the kernel tells it."""
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(address // PAGE * 8)
        entries = pagemap.read(size_bytes // PAGE * 8)
    present = (
        int.from_bytes(entries[i : i + 8], "little") >> 63 for i in range(0, len(entries), 8)
    )
    return sum(present) * PAGE
