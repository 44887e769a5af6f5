"""Any order of writes, sleeps, stagings, faults, allocations and frees: no byte differs."""

from __future__ import annotations

import ctypes
from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from sleepbackends.cumem.options import CumemOptions
from sleepbackends.vmm import copies, mover, saving, staging
from tests.cumem.sleeping_machine import SleepingMachine, run_machine
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


class Machine(SleepingMachine):
    """Memory that a sleep keeps, and what it should hold."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__(simulator, CumemOptions(share_below_bytes=2 * GRANULE_BYTES))
        for size in (5 * CHUNK, CHUNK + 3, 700):
            self.allocate(size, 1)

    def allocate(self, size: int, byte: int) -> None:
        self.add("lora" if byte % 2 else "weights", bytes([byte]) * size)

    def change(self, kind: str, number: int, at: int, byte: int) -> None:
        if kind == "allocate" and len(self.contents) < 7:
            self.allocate(at + 1, byte)
        elif not (kind == "undo" and self.take_back()) and self.contents:
            memory = self.choose(number)
            if kind == "free":
                self.free(memory)
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


def test_no_byte_differs(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(saving, "BATCH_CHUNKS", 3)
    monkeypatch.setattr(staging, "STEP_CHUNKS", 2)
    monkeypatch.setattr(mover, "GROUP_BYTES", {"down": 3 * CHUNK, "up": 3 * CHUNK})
    run_machine(partial(Machine, simulator), examples=200, steps=8)
