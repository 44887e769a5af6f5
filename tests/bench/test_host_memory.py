"""Host memory is touched and registered once, as the machine has it."""

from __future__ import annotations

import mmap
import time
from types import SimpleNamespace

import psutil
import pytest

from sleepbackends.bench import host_memory
from sleepbackends.bench.host_memory import MIB, touch_host_memory
from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.host_limits import HostMemory
from sleepbackends.hostmemory import driver
from tests.native.fixtures import kernel_images, native_library, simulator
from tests.simulators.cuda import Simulator

__all__ = ["kernel_images", "native_library", "simulator"]


class Growing:
    """A machine whose memory grows by so much whenever it is short, up to a limit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most_bytes: int) -> None:
        self.used_bytes, self.total_bytes, self._most_bytes = 0, 5 * MIB, most_bytes
        monkeypatch.setattr(host_memory, "STEP_BYTES", MIB)
        monkeypatch.setattr(psutil, "virtual_memory", self._machine)
        monkeypatch.setattr(host_memory, "GROWTH_S", 0.3)
        monkeypatch.setattr(host_memory, "POLL_S", 0.01)
        monkeypatch.setattr(host_memory, "host_memory", self._memory)
        populate = driver.populate

        def touch(address: int, size_bytes: int) -> None:
            self.used_bytes += size_bytes
            assert self.used_bytes <= self.total_bytes, "this process would have been killed"
            populate(address, size_bytes)

        monkeypatch.setattr(driver, "populate", touch)

    def _machine(self) -> SimpleNamespace:
        return SimpleNamespace(total=self.total_bytes)

    def _memory(self) -> HostMemory:
        available_bytes = self.total_bytes - self.used_bytes
        self.total_bytes = min(self._most_bytes, self.total_bytes + MIB // 2)
        return HostMemory(available_bytes, None, "machine")


def test_memory_that_grows_is_touched_as_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Growing(monkeypatch, 100 * MIB)
    assert touch_host_memory(30 * MIB + 1) == 30 * MIB + mmap.PAGESIZE == machine.used_bytes


def test_no_more_is_touched_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Growing(monkeypatch, 20 * MIB)
    assert touch_host_memory(30 * MIB) == 17 * MIB == machine.used_bytes
    assert touch_host_memory(MIB, until=time.monotonic()) == 0


def test_memory_is_registered_too_as_far_as_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch, simulator: Simulator
) -> None:
    Growing(monkeypatch, 100 * MIB)
    gpu, pinned = CudaDriver(), list[int]()
    real = gpu.pin

    def pin(address: int, size_bytes: int) -> None:
        real(address, size_bytes)
        pinned.append(size_bytes)

    monkeypatch.setattr(gpu, "pin", pin)
    simulator.set_pinned_limit_bytes(3 * MIB)
    assert touch_host_memory(2 * MIB, gpu) == 2 * MIB == sum(pinned)
    assert touch_host_memory(9 * MIB, gpu) == 9 * MIB
    assert sum(pinned) == 5 * MIB
    assert simulator.process_usage().pinned_bytes == 0
