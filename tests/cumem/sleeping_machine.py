"""What state machines over sleeping memory share: what it should hold, and calls that may fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.errors import SleepBackendsError
from sleepbackends.vmm.region import DeviceMemory
from tests.simulators.cuda import Simulator


class SleepingMachine(RuleBasedStateMachine):
    """Memory that a sleep keeps, and what it should hold."""

    def __init__(self, simulator: Simulator, options: CumemOptions) -> None:
        super().__init__()
        self.simulator = simulator
        self.backend = CumemBackend(options)
        self.contents: dict[DeviceMemory, bytearray] = {}
        self.staging: Any = None
        self.undo: tuple[DeviceMemory, bytes] | None = None

    def add(self, tag: str, data: bytes) -> None:
        with self.backend.region(tag) as region:
            memory = region.buffer(len(data))
        self.contents[memory] = bytearray(data)
        memory.write(data)

    def choose(self, number: int) -> DeviceMemory:
        return list(self.contents)[number % len(self.contents)]

    def free(self, memory: DeviceMemory) -> None:
        del self.contents[memory]
        memory.free()

    def take_back(self) -> bool:
        """Have memory hold what it held before the last write; tell whether there is that."""
        if self.undo is None or self.undo[0] not in self.contents:
            return False
        memory, before = self.undo
        self.contents[memory][:] = before
        memory.write(before)
        return True

    @rule()
    def trim(self) -> None:
        self.backend.trim()

    def attempt(self, call: Callable[[], object], fault: tuple[str, int] | None) -> None:
        """Make a call that fails if there is a fault, and only then."""
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


def options_in(folder: Path, **chosen: Any) -> CumemOptions:
    """Return options, with the folder for what they save to a disk or share."""
    where = {"tier": "disk_directory", "share_copies": "share_directory"}
    chosen |= {where[name]: folder for name in chosen if name in where}
    return CumemOptions.model_validate(chosen)


def run_machine(make: Callable[[], SleepingMachine], examples: int, steps: int) -> None:
    """Try so many sequences of so many steps."""
    run_state_machine_as_test(
        make,  # type: ignore[arg-type] # a factory will do
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
