"""Memory with contents of one kind or another, in backends that pack even little of it."""

from __future__ import annotations

import pytest

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.vmm import copies, mover
from sleepbackends.vmm.host_copy import Chunk
from sleepbackends.vmm.packing import packer
from sleepbackends.vmm.region import DeviceMemory
from tests.native.fixtures import GRANULE_BYTES
from tests.packing import contents
from tests.simulators.cuda import Simulator

CHUNK = GRANULE_BYTES
SLOTS = 3
TABLES_BYTES = 2 * GRANULE_BYTES
"""What a backend keeps for itself on a device: a granule to fingerprint, and one to pack."""


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(packer, "LEAST_BYTES", CHUNK // 4)
    monkeypatch.setattr(packer, "LEFT_BESIDE_BYTES", CHUNK)
    monkeypatch.setattr(packer, "MOST_SLOTS", SLOTS)
    monkeypatch.setattr(mover, "GROUP_BYTES", {"down": 4 * CHUNK, "up": 4 * CHUNK})


class Filled:
    """Memory of a backend, and what it holds."""

    def __init__(
        self,
        backend: CumemBackend,
        kind: str,
        chunks: float,
        seed: int = 1,
        *,
        tag: str = "weights",
        device: int = 0,
    ) -> None:
        with backend.region(tag, device) as region:
            self.memory: DeviceMemory = region.buffer(int(chunks * CHUNK))
        self.refill(kind, seed)

    @property
    def address(self) -> int:
        return self.memory.address

    @property
    def size_bytes(self) -> int:
        return self.memory.size_bytes

    def refill(self, kind: str, seed: int = 1) -> None:
        self.write(contents(kind, self.size_bytes, seed))

    def write(self, data: bytes) -> None:
        self.data = data
        self.memory.write(data)

    def is_as_written(self) -> bool:
        return self.memory.read() == self.data


def chunks_of(backend: CumemBackend) -> list[Chunk]:
    return [chunk for copy in backend._copies.all() for chunk in copy.chunks]


def saved_as(backend: CumemBackend) -> list[bool]:
    """Tell of each chunk whether it is packed."""
    return [chunk.is_packed for chunk in chunks_of(backend)]


def held_on_device(simulator: Simulator, device: int = 0) -> int:
    return simulator.device_usage(device).used_bytes
