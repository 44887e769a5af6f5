"""Kernels that are compiled at any moment: no byte differs, no memory that is away is taken."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from sleepbackends.cumem.options import CumemOptions
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.vmm import copies
from sleepbackends.vmm.driver import KernelUse
from sleepbackends.vmm.packing import packer
from sleepbackends.vmm.warm_up import WarmUp
from tests.cumem.sleeping_machine import SleepingMachine, run_machine
from tests.cumem.test_warm_up import BEGIN, KERNELS, SlowCompiler, is_over
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.cuda import Simulator
from tests.waiting import until

TAGS = ("weights", "kv_cache")
SIZE_BYTES = 2 * GRANULE_BYTES
ALL_BYTES = len(TAGS) * SIZE_BYTES
CHOSEN = st.sets(st.sampled_from(TAGS), min_size=1)
ASLEEP, AWAKE = (TagPolicy(policy, policy) for policy in (Policy.OFFLOAD, Policy.KEEP))
FAULTS = ("cuMemUnmap", "cuMemRelease", "cuMemcpyDtoHAsync", "cuMemMap", "cuLaunchKernel")
FAULT = st.one_of(st.none(), st.tuples(st.sampled_from(FAULTS), st.integers(1, 8)))


class Machine(SleepingMachine):
    """Memory of two tags, and kernels that may not be there yet."""

    def __init__(self, simulator: Simulator, compiler: SlowCompiler) -> None:
        super().__init__(simulator, CumemOptions())
        self.compiler = compiler
        self.loaded_in_vain: list[KernelUse] = []
        self.load, self.backend.driver.load = self.backend.driver.load, self.checked  # type: ignore[method-assign] # what it calls is looked at
        for event in compiler.may_go_on.values():
            event.clear()
        for number, tag in enumerate(TAGS):
            self.add(tag, bytes([number]) * SIZE_BYTES)

    def checked(self, device: int, use: KernelUse) -> None:
        if self.simulator.device_usage().used_bytes < ALL_BYTES:
            self.loaded_in_vain.append(use)
        self.load(device, use)

    @rule(name=st.sampled_from(KERNELS))
    def compile(self, name: str) -> None:
        self.compiler.finish(name)
        if all(event.is_set() for event in self.compiler.may_go_on.values()):
            until(is_over)

    @rule(tags=CHOSEN, fault=FAULT)
    def sleep(self, tags: set[str], fault: tuple[str, int] | None) -> None:
        policies = Policies({tag: ASLEEP if tag in tags else AWAKE for tag in TAGS})
        self.attempt(lambda: self.backend.suspend(1, policies=policies), fault)

    @rule(tags=CHOSEN, fault=FAULT)
    def wake(self, tags: set[str], fault: tuple[str, int] | None) -> None:
        self.attempt(lambda: self.backend.resume(tags), fault)

    @rule(number=st.integers(0, 1), at=st.integers(0, SIZE_BYTES - 1))
    def write(self, number: int, at: int) -> None:
        memory = self.choose(number)
        if TAGS[number] not in self.backend.state().asleep_tags():
            self.contents[memory][at] ^= 1
            memory.write(bytes(self.contents[memory]))

    def teardown(self) -> None:
        self.compiler.finish()
        until(is_over)
        super().teardown()
        assert self.loaded_in_vain == []


def test_no_byte_differs(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WarmUp, "begin", BEGIN)
    monkeypatch.setattr(copies, "CHUNK_BYTES", GRANULE_BYTES)
    monkeypatch.setattr(packer, "LEAST_BYTES", 512)
    run_machine(partial(Machine, simulator, SlowCompiler(monkeypatch)), examples=100, steps=12)
