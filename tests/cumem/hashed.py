"""Known bytes in the memory of each simulated device, and their fingerprints."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.vmm.fingerprint import Pending, Span
from tests.fingerprints import reference
from tests.native.fixtures import DEVICES
from tests.simulators.cuda import Simulator

DATA = random.Random(4).randbytes(700_000)  # noqa: S311 - test data
CUTS = [(0, 700_000), (0, 0), (1, 1), (7, 16), (512, 262_144), (3, 400_001), (16, 15)]


class Memory:
    """The data in memory of each device."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self.at = [self._allocate(device) for device in range(DEVICES)]

    def _allocate(self, device: int) -> int:
        with self.driver.current(device):
            address = int(self.driver.call(self.driver._cu.cuMemAlloc, len(DATA)))
        self.driver.write(address, DATA, device)
        return address

    def spans(self, cuts: Sequence[tuple[int, int]] = CUTS, device: int = 0) -> list[Span]:
        return [Span(self.at[device] + offset, size) for offset, size in cuts]

    def queue(self, cuts: Sequence[tuple[int, int]] = CUTS, device: int = 0) -> Pending | None:
        return self.driver.fingerprint(device, self.spans(cuts, device))

    def queued(self, cuts: Sequence[tuple[int, int]] = CUTS, device: int = 0) -> Pending:
        pending = self.queue(cuts, device)
        assert pending is not None
        return pending


def expected(cuts: Sequence[tuple[int, int]] = CUTS) -> list[int]:
    return [reference(DATA[offset : offset + size]) for offset, size in cuts]


@pytest.fixture
def memory(simulator: Simulator) -> Iterator[Memory]:
    """Checks that closing gives everything back that the fingerprints held."""
    driver = CudaDriver()
    memory = Memory(driver)
    held = usage(simulator)
    yield memory
    simulator.clear_faults()
    simulator.set_copy_rate(None)
    for device, address in enumerate(memory.at):
        assert driver.read(address, len(DATA), device) == DATA, "it is only read"
    driver.close()
    assert usage(simulator) == held


def usage(simulator: Simulator) -> list[int]:
    found = simulator.process_usage()
    live = [simulator.device_usage(device).live_handles for device in range(DEVICES)]
    return [found.pinned_bytes, found.live_streams, found.live_events, found.live_modules, *live]
