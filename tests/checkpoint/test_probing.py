"""What the probe answers, and that it touches nothing."""

from __future__ import annotations

import importlib
import platform
from pathlib import Path
from typing import Any

import pytest

from sleepbackends import cuda_bindings
from sleepbackends.checkpoint import device_memory, driver, probing
from sleepbackends.checkpoint.backend import CheckpointBackend
from sleepbackends.checkpoint.device_memory import DeviceMonitor
from sleepbackends.checkpoint.driver import CheckpointDriver
from sleepbackends.checkpoint.options import CheckpointOptions
from sleepbackends.config import SleepConfig
from sleepbackends.errors import BackendUnavailableError, InvalidOptionsError
from sleepbackends.orchestrator import Orchestrator
from sleepbackends.registry import Registry
from sleepbackends.selection import select
from sleepbackends.settings import BackendSettings
from tests.simulators.cuda import Simulator


def test_it_works_here(simulator: Simulator) -> None:
    answer = CheckpointBackend.probe()
    assert answer.ok
    assert "580.0.1" in answer.reason
    assert simulator.calls("cuInit") == 0, "a fork would be spoilt"


def reason(match: str) -> str:
    answer = CheckpointBackend.probe()
    assert not answer.ok
    assert answer.hint
    with pytest.raises(BackendUnavailableError):
        CheckpointBackend()
    assert match in answer.reason, answer
    return answer.reason


@pytest.mark.parametrize("version", ["12.8.0", "12.9.0", "13.0.1"])
def test_bindings_that_hold_the_gil(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(cuda_bindings, "version", lambda _: version)
    reason("GIL")


@pytest.mark.parametrize("name", ["cuCheckpointProcessRestore", "CUcheckpointRestoreArgs"])
def test_bindings_with_holes(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """13.0.0 could checkpoint and not restore."""
    monkeypatch.delattr(importlib.import_module("cuda.bindings.driver"), name)
    reason(name)
    with pytest.raises(BackendUnavailableError, match=name):
        CheckpointDriver()


def test_a_driver_without_the_calls(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libc.so.6")
    reason("cuCheckpointProcessLock")


def test_no_driver(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-absent.so.1")
    reason("cannot be loaded")


def test_no_management_library(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "LIBRARY", "libnvidia-ml-absent.so.1")
    reason("management library")


def test_gvisor(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        probing, "_read", lambda _: "Linux version 4.4.0 Sun Jan 10 15:06:54 PST 2016"
    )
    reason("gVisor")


def test_mps(simulator: Simulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert CheckpointBackend.probe().ok
    (tmp_path / "control").touch()
    reason("MPS")


def test_mig(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    reason("MIG")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(DeviceMonitor, "_is_partitioned", lambda *_: True)
    reason("MIG")


@pytest.mark.parametrize(("version", "good"), [((580, 1), False), ((595, 58), True)])
def test_arm(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], good: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(DeviceMonitor, "driver_version", lambda _: version)
    assert CheckpointBackend.probe().ok == good


def test_another_system(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert "Linux only" in CheckpointBackend.probe().reason


def test_nobody_gets_it_without_asking(simulator: Simulator) -> None:
    selection = select(Registry.load(), SleepConfig())
    assert selection.name != "checkpoint"
    assert "asked for by name" in selection.passed_over["checkpoint"]


WRONG: list[dict[str, Any]] = [
    {"include_self": False},
    {"helper": False, "processes": [1]},
    {"processes": [0]},
    {"lock_timeout_s": 0},
    {"typo": 1},
]


@pytest.mark.parametrize("options", WRONG)
def test_options_that_cannot_be(simulator: Simulator, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionsError):
        Registry.load().create("checkpoint", options, BackendSettings())
    with pytest.raises(InvalidOptionsError):
        Orchestrator.create(SleepConfig(backend="checkpoint", options=options))


def test_every_option_is_described() -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoint.md").read_text()
    for name in CheckpointOptions.model_fields:
        assert f"| `{name}` |" in text
