"""Any order of sleeps, wake-ups, faults and what others do to the process: no byte is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sleepbackends.checkpoint.waking import wake
from sleepbackends.errors import PolicyConflictError, SleepBackendsError, SuspendedError
from sleepbackends.residency import Residency
from tests.checkpoint.conftest import MIB, SIZE
from tests.checkpoint.test_composite import KV_CACHE, ME, WEIGHTS, Setup
from tests.native.fixtures import kernel_images, native_library, simulator
from tests.simulators.cuda import SharedDevices, Simulator
from tests.simulators.cuda.driving import read, write

__all__ = ["kernel_images", "native_library", "simulator"]

RUNNING, CHECKPOINTED = 0, 2
NOT_SUPPORTED = 801
NO_ROOM, BUSY, NO_HELPER = "no room", "busy", "no helper"
CALLS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemcpyDtoHAsync")
STEPS = ("lock", "checkpoint", "unlock")
FAULT = st.one_of(
    st.none(),
    st.tuples(st.sampled_from(CALLS), st.integers(1, 4)),
    st.tuples(st.sampled_from((*STEPS, NO_ROOM, BUSY, NO_HELPER)), st.just(1)),
)
TAGS = ("weights", "kv_cache")
MAPPED = {Residency.RESIDENT, Residency.UNDEFINED}

Fault = tuple[str, int]


@dataclass
class Memory:
    """A piece of memory, and what it should hold when it can be read."""

    tag: str
    address: int
    expected: bytes


class Machine(RuleBasedStateMachine):
    """A process, what it holds, and what somebody else did to it."""

    def __init__(
        self, both: Setup, devices: SharedDevices, simulator: Simulator, runtime: Path
    ) -> None:
        super().__init__()
        self.backend, self.devices, self.simulator = both.backend, devices, simulator
        self.both, self.runtime = both, runtime
        self.contents: list[Memory] = []
        self.woken_by_another = False
        write(both.plain, b"plain")
        for tag, size_bytes in zip(TAGS, (WEIGHTS, KV_CACHE), strict=True):
            self.allocate(tag, size_bytes, 1)

    @property
    def runs(self) -> bool:
        return self.devices.checkpoint_state(ME) == RUNNING

    def allocate(self, tag: str, size_bytes: int, byte: int) -> None:
        address = self.backend.allocate(tag, size_bytes)
        self.contents.append(Memory(tag, address, bytes([byte]) * 9))
        write(address, self.contents[-1].expected)

    def residency(self, memory: Memory) -> Residency | None:
        found: Residency | None = self.backend.outer.residency_at(memory.address)
        return found

    def attempt(
        self,
        call: Callable[[], object],
        fault: Fault | None,
        *refusals: type[SleepBackendsError],
    ) -> None:
        """Make a call that fails if there is a fault, or as refused, and not otherwise."""
        if fault is not None:
            self.inject(*fault)
        try:
            call()
            self.woken_by_another = False
        except refusals:
            pass
        except SleepBackendsError:
            assert fault is not None, "nothing failed"
        finally:
            self.heal()
        for memory in self.contents:
            if self.residency(memory) is Residency.DISCARDED:
                memory.expected = bytes(len(memory.expected))

    def inject(self, name: str, nth: int) -> None:
        if name in CALLS:
            self.simulator.fail(name, 999, nth)
        elif name in STEPS:
            self.devices.let_fail(ME, name, NOT_SUPPORTED)
        elif name == NO_ROOM:
            self.devices.set_budget_bytes(MIB)
        elif name == BUSY:
            self.devices.set_busy(ME, True)
        elif name == NO_HELPER and self.backend.inner.helper_pid is not None:
            os.kill(self.backend.inner.helper_pid, signal.SIGKILL)

    def heal(self) -> None:
        self.simulator.clear_faults()
        self.devices.set_budget_bytes(None)
        self.devices.set_busy(ME, False)
        for step in STEPS:
            self.devices.let_fail(ME, step, 0)

    @precondition(lambda self: self.runs)
    @rule(tag=st.sampled_from(TAGS), size_bytes=st.integers(1, 2 * MIB), byte=st.integers(0, 255))
    def more(self, tag: str, size_bytes: int, byte: int) -> None:
        if len(self.contents) < 6:
            self.allocate(tag, size_bytes + 9, byte)

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0, 5), byte=st.integers(0, 255))
    def change(self, number: int, byte: int) -> None:
        memory = self.contents[number % len(self.contents)]
        if self.residency(memory) in MAPPED:
            memory.expected = bytes([byte]) * len(memory.expected)
            write(memory.address, memory.expected)

    @precondition(lambda self: self.runs and len(self.contents) > 1)
    @rule(number=st.integers(0, 5))
    def free(self, number: int) -> None:
        self.backend.free(self.contents.pop(number % len(self.contents)).address)

    @rule(
        level=st.sampled_from([1, 1, 2]),
        depth=st.sampled_from(["process", "process", "memory"]),
        fault=FAULT,
    )
    def sleep(self, level: int, depth: str, fault: Fault | None) -> None:
        # Tags that sleep one way already are not put to sleep the other way.
        call = partial(self.backend.suspend, level, depth=depth)
        self.attempt(call, fault, PolicyConflictError)

    @rule(tags=st.one_of(st.none(), st.sets(st.sampled_from([*TAGS, "process"]))), fault=FAULT)
    def wake(self, tags: set[str] | None, fault: Fault | None) -> None:
        known = self.backend.state().tags
        chosen = None if tags is None else tags & set(known)
        self.attempt(partial(self.backend.resume, chosen), fault)

    @rule(fault=FAULT)
    def release(self, fault: Fault | None) -> None:
        refusals = (SuspendedError, PolicyConflictError)
        if "kv_cache" in self.backend.state().tags:
            self.attempt(lambda: self.backend.discard({"kv_cache"}), fault, *refusals)

    @precondition(lambda self: self.devices.checkpoint_state(ME) == CHECKPOINTED)
    @rule()
    def another_wakes_it(self) -> None:
        assert wake(ME, self.runtime).changed
        self.woken_by_another = True

    @invariant()
    def what_is_said_is_so(self) -> None:
        state = self.devices.checkpoint_state(ME)
        if state == CHECKPOINTED:
            assert self.devices.used_bytes()[ME] == 0
        if not self.woken_by_another and state in (RUNNING, CHECKPOINTED):
            assert self.backend.state().context_released == (state == CHECKPOINTED)
        if not self.runs:
            return
        assert read(self.both.plain, 5) == b"plain"
        for memory in self.contents:
            if self.residency(memory) in MAPPED:
                assert read(memory.address, len(memory.expected)) == memory.expected

    def teardown(self) -> None:
        self.backend.resume()
        assert self.runs
        self.what_is_said_is_so()
        assert all(self.residency(memory) in MAPPED for memory in self.contents)
        for memory in self.contents:
            self.backend.free(memory.address)
        assert self.devices.used_bytes()[ME] < SIZE + MIB, "but for kernels and their results"


@pytest.fixture
def both(devices: SharedDevices, simulator: Simulator, runtime: Path) -> Iterator[Setup]:
    """One for all sequences: a helper takes longer to start than a sequence."""
    inner: dict[str, Any] = {"runtime_directory": runtime, "device_margin_bytes": 0}
    setup = Setup(runtime, checkpoint={**inner, "lock_timeout_s": 0.1})
    for address in (setup.weights, setup.kv_cache):
        setup.backend.free(address)
    yield setup
    setup.orchestrator.close()


@pytest.mark.timeout(600)
def test_no_byte_is_lost(
    both: Setup, devices: SharedDevices, simulator: Simulator, runtime: Path
) -> None:
    run_state_machine_as_test(
        partial(Machine, both, devices, simulator, runtime),  # type: ignore[arg-type] # a factory
        settings=settings(
            max_examples=40,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
