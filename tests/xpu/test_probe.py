"""What the probe answers, whom it asks, and that it never raises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.availability import Availability
from sleepbackends.registry import Registry
from sleepbackends.vmm import address_space
from sleepbackends.vmm import probing as elsewhere
from sleepbackends.xpu import probing
from sleepbackends.xpu.backend import XpuBackend
from sleepbackends.xpu.driver import XpuDriver
from sleepbackends.xpu.probing import ask
from tests.simulators.level_zero import Simulator, environment
from tests.xpu.fixtures import DEVICE_LOST, UNSUPPORTED_FEATURE


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(elsewhere, "python_command", refuse)


def run(code: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def without_driver() -> dict[str, str]:
    """An environment in which the loader finds no driver."""
    return {**os.environ, "ZE_ENABLE_ALT_DRIVERS": "/absent/driver.so"}


PROBE = (
    "from sleepbackends.xpu.backend import XpuBackend as B; a = B.probe(); print(a.ok, a.reason)"
)


NO_DRIVER = "False Level Zero cannot be initialised: no driver was found"


def test_two_devices() -> None:
    answer = run(PROBE, environment(2))
    assert answer.startswith("True 2 Intel GPU(s) with virtual memory management: simulated")


def test_no_device() -> None:
    # A newer loader takes a driver without devices for none.
    assert run(PROBE, environment(0)).startswith(("False Level Zero sees no GPU", NO_DRIVER))


def test_no_driver() -> None:
    assert run(PROBE, without_driver()) == NO_DRIVER


def test_it_initialises_nothing_in_this_process() -> None:
    code = (
        f"{PROBE}\nimport ctypes\n"
        "loader, count = ctypes.CDLL('libze_loader.so.1'), ctypes.c_uint32()\n"
        "print(hex(loader.zeDriverGet(ctypes.byref(count), None) & 0xffffffff))"
    )
    assert run(code, environment(1)).endswith("\n0x78000001"), "not initialised"


def test_without_a_loader(
    simulator: Simulator, no_child: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "LIBRARY", "libze-absent.so.1")
    answer = XpuBackend.probe()
    assert not answer.ok
    assert answer.reason.startswith("the Level Zero loader cannot be loaded: libze-absent.so.1")
    assert "apt-get install libze1" in answer.hint


def test_without_a_native_library(
    simulator: Simulator, no_child: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(address_space, "_FOLDER", tmp_path)
    answer = XpuBackend.probe()
    assert not answer.ok
    assert "was not built" in answer.reason


@pytest.mark.parametrize("missing", ["device", "driver", "loader"])
def test_the_command_says_why_and_what_to_do(missing: str) -> None:
    """On a machine without what is missing."""
    code = (
        "from sleepbackends.cli import main\n"
        "from sleepbackends.xpu import probing\n"
        f"if {missing == 'loader'}: probing.LIBRARY = 'libze-absent.so.1'\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "backends", "--json"],
        env=environment(0) if missing == "device" else without_driver(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    listed: list[dict[str, Any]] = json.loads(done.stdout)["backends"]
    (xpu,) = (each for each in listed if each["name"] == "xpu")
    assert not xpu["available"]
    assert xpu["reason"]
    assert xpu["hint"]


# The self-test


def answer(simulator: Simulator) -> Availability:
    found = ask()
    assert simulator.usage("reserved_bytes") == simulator.usage("handles") == 0
    return found


def test_a_device_that_works(simulator: Simulator) -> None:
    assert answer(simulator).ok


def test_a_driver_without_virtual_memory(simulator: Simulator) -> None:
    simulator.fail("zeVirtualMemReserve", UNSUPPORTED_FEATURE, times=None)
    found = answer(simulator)
    assert not found.ok
    assert "lacks virtual memory that works: allocating failed: UNSUPPORTED_FEATURE" in found.reason
    assert "update the Intel GPU driver" in found.hint


def test_a_driver_that_knows_no_page_size(simulator: Simulator) -> None:
    """As the null driver of the loader's own project."""
    simulator.fail("zeVirtualMemQueryPageSize", UNSUPPORTED_FEATURE, times=None)
    assert not answer(simulator).ok


def test_an_address_that_is_not_taken_for_device_memory(simulator: Simulator) -> None:
    simulator.set("pointer_type", 0)
    assert "does not take its address for one of device memory" in answer(simulator).reason


@pytest.mark.parametrize(
    "function",
    ["zePhysicalMemCreate", "zeVirtualMemMap", "zeCommandListAppendMemoryCopy"],
)
def test_a_call_that_fails(simulator: Simulator, function: str) -> None:
    simulator.fail(function, DEVICE_LOST, times=None)
    found = ask()
    assert not found.ok
    assert "DEVICE_LOST" in found.reason
    assert found.hint


def test_a_device_that_is_no_gpu_does_not_count(simulator: Simulator) -> None:
    simulator.set("device_type", 5, device=0)  # a neural processor
    assert ask().reason.startswith("1 Intel GPU(s)")
    assert XpuDriver().device(0).name == "simulated device 1 (not hardware)"


# Which backend is chosen


def test_it_comes_after_cumem_and_before_host() -> None:
    registry = Registry.load()
    priority = [registry.get(name).spec.auto_priority for name in ("cumem", "xpu", "host")]
    assert None not in priority
    assert priority == sorted(set(priority), key=lambda each: -(each or 0))
