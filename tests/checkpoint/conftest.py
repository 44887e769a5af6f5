"""Simulated devices that processes share, and processes that sleep on them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sleepbackends.checkpoint import device_memory, driver, probing
from sleepbackends.checkpoint.targets import Target
from tests.simulators.cuda import SharedDevices, Simulator, build, environment, loaded_or_skip

MIB = 1 << 20
SIZE = 64 * MIB
"""What each of the sleepers holds."""


def use_simulated_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process find the simulated driver, and its management library, by their paths."""
    simulated = build()
    # Beside the driver, under the name of the library that helpers look for.
    link = simulated.parent / device_memory.LIBRARY
    if not link.exists():
        scratch = link.with_name(f"{link.name}.{os.getpid()}")
        scratch.symlink_to(simulated.name)
        scratch.replace(link)
    monkeypatch.setattr(device_memory, "LIBRARY", str(link))
    monkeypatch.setattr(driver, "LIBRARY", str(simulated))
    monkeypatch.setattr(probing, "_MPS", simulated.parent / "no-mps")


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedDevices]:
    """Two devices, shared with the helpers that a test starts."""
    shared = tmp_path / "devices"
    loaded_or_skip()
    for name, value in environment(build().parent, devices=2, shared=shared).items():
        monkeypatch.setenv(name, value)
    use_simulated_libraries(monkeypatch)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    opened = SharedDevices(shared)
    yield opened
    opened.close()


@pytest.fixture
def simulator(devices: SharedDevices) -> Iterator[Simulator]:
    simulator = loaded_or_skip()
    simulator.reset()
    yield simulator
    # Nothing may be left asleep: the next test's calls would wait for ever.
    simulator.reset()


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    path = tmp_path / "sleepbackends"
    path.mkdir(mode=0o700)
    return path


Sleepers = Callable[[int], list[Target]]


@pytest.fixture
def sleepers(devices: SharedDevices, simulator: Simulator) -> Iterator[Sleepers]:
    """Processes that only exist, and count as using the first device."""
    processes = []

    def start(count: int) -> list[Target]:
        found = []
        for _ in range(count):
            process = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)  # noqa: S607
            processes.append(process)
            devices.register(process.pid, SIZE)
            found.append(Target.of(process.pid))
        return found

    yield start
    for process in processes:
        process.kill()
        process.wait()
