"""Sleeps that pack: the same bytes come back, fewer cross the link and fewer are kept."""

from __future__ import annotations

import pytest

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.vmm import copies, mover
from sleepbackends.vmm.packing import packer
from sleepbackends.vmm.region import DeviceMemory
from tests.cumem.test_backend import Make, make
from tests.native.fixtures import GRANULE_BYTES
from tests.packing import contents
from tests.simulators.cuda import Simulator

__all__ = ["make"]

CHUNK = GRANULE_BYTES
pytestmark: list[pytest.MarkDecorator] = []


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(packer, "LEAST_BYTES", CHUNK // 4)
    monkeypatch.setattr(packer, "MOST_SLOTS", 3)
    monkeypatch.setattr(mover, "GROUP_BYTES", {"down": 4 * CHUNK, "up": 4 * CHUNK})


def holding(
    backend: CumemBackend, kind: str, size_bytes: int, seed: int = 1, tag: str = "weights"
) -> tuple[DeviceMemory, bytes]:
    data = contents(kind, size_bytes, seed)
    with backend.region(tag) as region:
        memory = region.buffer(size_bytes)
    memory.write(data)
    return memory, data


@pytest.mark.parametrize("verify", ["off", "resume"])
def test_weights_take_fewer_bytes(simulator: Simulator, make: Make, verify: str) -> None:
    backend = make(verify=verify)
    size = 20 * CHUNK
    memory, data = holding(backend, "weights", size)
    report = backend.suspend(1)
    assert report.copied_bytes == size
    assert 0.65 < report.packing_ratio < 0.75
    assert report.link_bytes <= backend._store.held_bytes < 0.75 * size
    assert simulator.device_usage().used_bytes < CHUNK, "tables at most"
    woken = backend.resume()
    assert woken.link_bytes == report.link_bytes
    assert memory.read() == data
    again = backend.suspend(1)
    assert (again.copied_bytes, again.clean_bytes) == (0, size)
    backend.resume()
    assert memory.read() == data
