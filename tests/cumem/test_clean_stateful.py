"""Any order of writes, sleeps, stagings, faults, allocations and frees: no byte differs."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.errors import SleepBackendsError
from sleepbackends.vmm import copies, mover, saving, staging
from sleepbackends.vmm.region import DeviceMemory
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.cuda import Simulator

CHUNK = GRANULE_BYTES // 2
FAULTS = (
    *("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemMap", "cuMemCreate", "cuMemUnmap"),
    *("cuEventRecord", "cuLaunchKernel", "cuMemRelease"),
)

Change = tuple[str, int, int, int]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "undo", "free", "allocate"]),
        st.integers(0, 5),
        st.integers(0, 4 * GRANULE_BYTES),
        st.integers(0, 255),
    ),
    max_size=4,
)
FAULT = st.one_of(st.none(), st.tuples(st.sampled_from(FAULTS), st.integers(1, 8)))


class Machine(RuleBasedStateMachine):
    """Memory that a sleep keeps, and what it should hold."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__()
        self.simulator = simulator
        self.backend = CumemBackend(CumemOptions(share_below_bytes=2 * GRANULE_BYTES))
        self.contents: dict[DeviceMemory, bytearray] = {}
        self.staging: Any = None
        self.undo: tuple[DeviceMemory, bytes] | None = None
        for size in (5 * CHUNK, CHUNK + 3, 700):
            self.allocate(size, 1)

    def allocate(self, size: int, byte: int) -> None:
        with self.backend.region("lora" if byte % 2 else "weights") as region:
            memory = region.buffer(size)
        self.contents[memory] = bytearray([byte]) * size
        memory.write(bytes(self.contents[memory]))

    def change(self, kind: str, number: int, at: int, byte: int) -> None:
        if kind == "allocate" and len(self.contents) < 7:
            self.allocate(at + 1, byte)
        elif kind == "undo" and self.undo is not None and self.undo[0] in self.contents:
            memory, before = self.undo
            self.contents[memory][:] = before
            memory.write(before)
        elif self.contents:
            memory = list(self.contents)[number % len(self.contents)]
            if kind == "free":
                del self.contents[memory]
                memory.free()
            else:
                self.undo = memory, bytes(self.contents[memory])
                at %= memory.size_bytes
                length = min(CHUNK, memory.size_bytes - at)
                ctypes.memset(memory.address + at, byte, length)
                self.contents[memory][at : at + length] = bytes([byte]) * length

    @rule(
        changes=CHANGES,
        stage=st.sampled_from(["no", "before", "beside"]),
        later=CHANGES,
        down=FAULT,
        freed=st.one_of(st.none(), st.integers(0, 5)),
        up=FAULT,
    )
    def cycle(
        self,
        changes: list[Change],
        stage: str,
        later: list[Change],
        down: tuple[str, int] | None,
        freed: int | None,
        up: tuple[str, int] | None,
    ) -> None:
        for each in changes:
            self.change(*each)
        if stage != "no":
            beside = stage == "beside"
            self.staging = self.backend.stage(background=beside, limit_gib_s=1000.0)
        for each in later:
            self.change(*each)
        self.attempt(lambda: self.backend.suspend(1), down)
        if freed is not None:
            self.change("free", freed, 0, 0)
        self.attempt(self.backend.resume, up)
        if self.backend.state().asleep_bytes:
            self.backend.resume()
        self.check()

    @rule()
    def trim(self) -> None:
        self.backend.trim()

    def attempt(self, call: Any, fault: tuple[str, int] | None) -> None:
        if fault is not None:
            if self.staging is not None:
                self.staging.wait(60)  # else the fault may hit it instead
            self.simulator.fail(*fault)
        try:
            call()
        except SleepBackendsError:
            assert fault is not None, "nothing failed"
        finally:
            self.simulator.clear_faults()

    def check(self) -> None:
        for memory, expected in self.contents.items():
            assert memory.read() == bytes(expected), "bytes differ from what was kept"

    def teardown(self) -> None:
        self.backend.resume()
        self.check()
        for memory in self.contents:
            memory.free()
        self.backend.close()
        assert self.simulator.process_usage().pinned_bytes == 0
        assert self.simulator.process_usage().reserved_bytes == 0


def test_no_byte_differs(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(saving, "BATCH_CHUNKS", 3)
    monkeypatch.setattr(staging, "STEP_CHUNKS", 2)
    monkeypatch.setattr(mover, "GROUP_BYTES", {"down": 3 * CHUNK, "up": 3 * CHUNK})
    run_state_machine_as_test(
        partial(Machine, simulator),  # type: ignore[arg-type] # a factory will do
        settings=settings(
            max_examples=200,
            stateful_step_count=8,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
