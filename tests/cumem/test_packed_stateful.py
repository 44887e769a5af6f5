"""Any order of writes of any kind, sleeps, stagings, faults and frees, packed: no byte differs."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from sleepbackends.cumem.options import CumemOptions
from sleepbackends.vmm import copies, mover, saving, staging
from sleepbackends.vmm.packing import packer
from tests.cumem.sleeping_machine import SleepingMachine, options_in, run_machine
from tests.native.fixtures import GRANULE_BYTES
from tests.packing import CONTENTS, contents
from tests.simulators.cuda import Simulator

CHUNK = GRANULE_BYTES // 2
FAULTS = (
    *("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemMap", "cuMemCreate", "cuMemUnmap"),
    *("cuEventRecord", "cuLaunchKernel", "cuMemRelease", "cuStreamWaitEvent", "cuEventSynchronize"),
    *("cuMemAddressReserve", "cuMemSetAccess", "cuMemGetInfo", "cuStreamSynchronize"),
)
KINDS = st.sampled_from([*CONTENTS, "weights", "weights", "outliers"])
WRITES = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "write", "undo", "free", "allocate"]),
        st.integers(0, 5),
        st.integers(0, 6 * CHUNK),
        KINDS,
        st.integers(0, 99),
    ),
    max_size=4,
)
FAULT = st.one_of(st.none(), st.tuples(st.sampled_from(FAULTS), st.integers(1, 12)))
Write = tuple[str, int, int, str, int]


class Machine(SleepingMachine):
    """Memory that a sleep keeps, what it should hold, and a neighbour on the device."""

    def __init__(self, simulator: Simulator, options: CumemOptions) -> None:
        super().__init__(simulator, options)
        for size, kind in ((7 * CHUNK, "weights"), (CHUNK + 3, "fp32"), (700, "random")):
            self.allocate(size, kind, 1)
        # What the backend keeps for itself on the device is there before that becomes full.
        self.backend.suspend(1)
        self.backend.resume()

    def allocate(self, size: int, kind: str, seed: int) -> None:
        self.add("lora" if seed % 2 else "weights", contents(kind, size, seed))

    def change(self, what: str, number: int, at: int, kind: str, seed: int) -> None:
        if what == "allocate" and len(self.contents) < 7:
            self.allocate(at + 1, kind, seed)
        elif not (what == "undo" and self.take_back()) and self.contents:
            memory = self.choose(number)
            if what == "free":
                self.free(memory)
            else:
                self.undo = memory, bytes(self.contents[memory])
                at = at % memory.size_bytes & ~1
                data = contents(kind, min(3 * CHUNK, memory.size_bytes - at), seed)
                ctypes.memmove(memory.address + at, data, len(data))
                self.contents[memory][at : at + len(data)] = data

    @rule(
        writes=WRITES,
        stage=st.sampled_from(["no", "before", "beside"]),
        later=WRITES,
        down=FAULT,
        left=st.sampled_from([1 << 30, 1 << 30, 6, 2, 1, 0]),
        freed=st.one_of(st.none(), st.integers(0, 5)),
        up=FAULT,
    )
    def cycle(
        self,
        writes: list[Write],
        stage: str,
        later: list[Write],
        down: tuple[str, int] | None,
        left: int,
        freed: int | None,
        up: tuple[str, int] | None,
    ) -> None:
        for each in writes:
            self.change(*each)
        if stage != "no":
            beside = stage == "beside"
            self.staging = self.backend.stage(background=beside, limit_gib_s=1000.0)
        for each in later:
            self.change(*each)
        used = self.simulator.device_usage().used_bytes
        self.simulator.set_budget_bytes(used + left * GRANULE_BYTES)
        self.attempt(lambda: self.backend.suspend(1), down)
        if freed is not None:
            self.change("free", freed, 0, "", 0)
        self.attempt(self.backend.resume, up)
        if self.backend.state().asleep_bytes:
            self.backend.resume()
        self.simulator.set_budget_bytes(None)
        self.check()


OPTIONS: dict[str, dict[str, Any]] = {
    "memory": {},
    "verified": {"verify": "resume", "retention": "none"},
    "disk": {"tier": "disk"},
    "shared": {"share_copies": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_no_byte_differs(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr(copies, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(packer, "LEAST_BYTES", 512)
    monkeypatch.setattr(packer, "LEFT_BESIDE_BYTES", 4 * GRANULE_BYTES)
    monkeypatch.setattr(packer, "MOST_SLOTS", 4)
    monkeypatch.setattr(saving, "BATCH_CHUNKS", 3)
    monkeypatch.setattr(staging, "STEP_CHUNKS", 3)
    monkeypatch.setattr(mover, "GROUP_BYTES", {"down": 3 * CHUNK, "up": 3 * CHUNK})
    options = options_in(tmp_path, share_below_bytes=2 * GRANULE_BYTES, **OPTIONS[name])
    run_machine(partial(Machine, simulator, options), examples=40, steps=6)
