"""Two devices on two made-up NUMA nodes: what is saved of each is touched on its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.hostmemory import numa
from sleepbackends.vmm import arena
from sleepbackends.vmm.touch import touch
from tests.hostmemory.sysfs import sysfs
from tests.simulators.cuda import Simulator

DEVICES = {"0000:10:00.0": "0", "0000:11:00.0": "1"}
SIZES = [(0, 300_000), (1, 200_000), (0, 100_000), (1, 70_000)]
"""Device and bytes."""


def test_the_driver_says_where_devices_are(simulator: Simulator) -> None:
    driver = CudaDriver()
    assert [driver.pci_address(device) for device in range(2)] == ["0000:10:00.0", "0000:11:00.0"]
    driver.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_saved_bytes_are_on_the_node_of_their_device(
    simulator: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = os.sched_getaffinity(0)
    cpus = sorted(allowed)[:2]
    monkeypatch.setattr(numa, "SYSFS", sysfs(tmp_path, dict(enumerate(map(str, cpus))), DEVICES))
    touched: dict[int, set[int]] = {}

    def note(address: int, size_bytes: int) -> None:
        touched[address] = os.sched_getaffinity(0)
        touch(address, size_bytes)

    monkeypatch.setattr(arena, "touch", note)
    backend = CumemBackend()
    kept = []
    for number, (device, size_bytes) in enumerate(SIZES):
        with backend.region("weights", device) as region:
            kept.append(region.buffer(size_bytes))
        kept[-1].write(bytes([number + 1]) * size_bytes)
    backend.suspend(1)
    store: Any = backend._store
    assert {segment.node for segment in store._segments} == {0, 1}
    backend.state()
    for block in backend.ledger.blocks():
        for chunk in backend._copies[block].chunks:
            saved: Any = chunk.saved
            assert saved.segment.node == block.extra.device
            assert touched[saved.segment.address] == {cpus[block.extra.device]}
    backend.resume()
    for number, memory in enumerate(kept):
        assert memory.read() == bytes([number + 1]) * memory.size_bytes
    assert os.sched_getaffinity(0) == allowed
    backend.close()
