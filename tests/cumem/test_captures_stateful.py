"""An engine captures graphs while it is awake: whatever goes on beside it, none is lost."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from sleepbackends.cumem.options import CumemOptions
from sleepbackends.vmm import copies, reclaim, staging
from sleepbackends.vmm.packing import packer
from sleepbackends.vmm.warm_up import WarmUp
from tests.cumem.sleeping_machine import SleepingMachine, options_in, run_machine
from tests.cumem.test_warm_up import BEGIN
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.cuda import Simulator

CHUNK = GRANULE_BYTES // 2
NUMBER = st.integers(0, 5)
SIZE = st.integers(1, 6 * CHUNK)
BYTE = st.integers(0, 255)


class Machine(SleepingMachine):
    """Memory of an engine that captures, and what a backend does beside it."""

    def __init__(self, simulator: Simulator, options: CumemOptions) -> None:
        super().__init__(simulator, options)
        self._before = simulator.violations()

    def allocate(self, size: int, byte: int) -> None:
        with self.backend.region("weights") as region:
            memory = region.buffer(size)
        # As a kernel writes: a copy would wait for the device.
        ctypes.memset(memory.address, byte, size)
        self.contents[memory] = bytearray([byte]) * size

    @rule(on=st.booleans())
    def capture(self, on: bool) -> None:
        self.simulator.set_capturing(on)

    @rule(size=SIZE, byte=BYTE)
    def add_memory(self, size: int, byte: int) -> None:
        if len(self.contents) < 6:
            self.allocate(size, byte)

    @rule(number=NUMBER, at=SIZE, byte=BYTE)
    def write(self, number: int, at: int, byte: int) -> None:
        if self.contents:
            memory = self.choose(number)
            at %= memory.size_bytes
            ctypes.memset(memory.address + at, byte, memory.size_bytes - at)
            self.contents[memory][at:] = bytes([byte]) * (memory.size_bytes - at)

    @rule(number=NUMBER)
    def free_memory(self, number: int) -> None:
        """Free: that waits for the device, as freeing does."""
        self.simulator.set_capturing(False)
        if self.contents:
            self.free(self.choose(number))

    @rule(background=st.booleans())
    def stage(self, background: bool) -> None:
        self.staging = self.backend.stage(background=background, limit_gib_s=1000.0)

    @rule()
    def wait(self) -> None:
        if self.staging is not None:
            self.staging.wait(60)

    @rule(asleep=st.lists(st.sampled_from(["capture", "trim", "end"]), max_size=3))
    def sleep(self, asleep: list[str]) -> None:
        """Sleep and wake; meanwhile another model of the process may capture too."""
        self.simulator.set_capturing(False)
        self.backend.suspend(1)
        for what in asleep:
            if what == "trim":
                self.backend.trim()
            else:
                self.simulator.set_capturing(what == "capture")
        self.simulator.set_capturing(False)
        self.backend.resume()
        self.check()

    def check(self) -> None:
        super().check()
        assert self.simulator.violations() == self._before

    def teardown(self) -> None:
        self.simulator.set_capturing(False)
        super().teardown()


OPTIONS: dict[str, dict[str, Any]] = {
    "memory": {},
    "released": {"retention": "release"},
    "disk": {"tier": "disk"},
    "shared": {"share_copies": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_no_capture_is_lost(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr(WarmUp, "begin", BEGIN)
    monkeypatch.setattr(reclaim, "DELAY_S", 0.001)
    monkeypatch.setattr(copies, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(packer, "LEAST_BYTES", 512)
    monkeypatch.setattr(staging, "STEP_CHUNKS", 3)
    options = options_in(tmp_path, **OPTIONS[name])
    run_machine(partial(Machine, simulator, options), examples=40, steps=12)
