"""What the probe answers where something is missing, and that it never raises."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from sleepbackends.cumem import driver
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.driver import bindings_problem
from sleepbackends.errors import BackendUnavailableError
from sleepbackends.vmm import address_space
from tests.simulators.cuda import Simulator


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("11.8.6", False),
        ("12.0.0", False),
        ("12.8.0", False),
        ("12.9.0", False),
        ("12.9.1", True),
        ("12.9.1rc1", True),
        ("12.9.10", True),
        ("12.10.0", True),
        ("13.0.0", False),
        ("13.0.1", False),
        ("13.0.2", True),
        ("13.0.2.post1", True),
        ("13.4.4", True),
        ("14.0.0", True),
        ("12", False),
        ("unknown", False),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, text: str, good: bool) -> None:
    monkeypatch.setattr(driver, "version", lambda _: text)
    problem = bindings_problem()
    assert (problem is None) == good
    if problem is not None:
        assert text in problem.reason
        assert "sleepbackends[cuda]" in problem.hint


def test_without_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(driver, "version", missing)
    answer = CumemBackend.probe()
    assert not answer.ok
    assert "not installed" in answer.reason
    with pytest.raises(BackendUnavailableError, match="not installed"):
        CumemBackend()


def test_old_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "version", lambda _: "12.8.0")
    assert "GIL" in CumemBackend.probe().reason


def test_bindings_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "version", lambda _: "13.4.0")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    answer = CumemBackend.probe()
    assert not answer.ok
    assert "cannot be imported" in answer.reason


def test_without_a_native_library(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(address_space, "_FOLDER", tmp_path)
    answer = CumemBackend.probe()
    assert not answer.ok
    assert "was not built" in answer.reason
    assert "C compiler" in answer.hint


def test_without_a_device(simulator: Simulator) -> None:
    simulator.reset()
    simulator.set_devices(0)
    answer = CumemBackend.probe()
    assert not answer.ok
    assert "NO_DEVICE" in answer.reason


def test_devices_without_virtual_memory(simulator: Simulator) -> None:
    for device in (0, 1):
        simulator.set_attribute(102, 0, device)
    answer = CumemBackend.probe()
    assert not answer.ok
    assert "none of 2" in answer.reason
    simulator.set_attribute(102, 1, 1)
    assert CumemBackend.probe().ok


def test_it_creates_no_context(simulator: Simulator) -> None:
    assert CumemBackend.probe().ok
    assert simulator.calls("cuDevicePrimaryCtxRetain") == 0


def test_without_a_driver() -> None:
    """In a process that has neither a real driver nor the simulated one."""
    pytest.importorskip("cuda.bindings.driver")
    code = (
        "import ctypes\n"
        "try: ctypes.CDLL('libcuda.so.1')\n"
        "except OSError: pass\n"
        "else: raise SystemExit('there is a driver')\n"
        "from sleepbackends.cumem.backend import CumemBackend\n"
        "answer = CumemBackend.probe(); print(answer.ok, answer.reason)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if "there is a driver" in done.stderr:
        pytest.skip("this machine has a driver")
    assert done.stdout.startswith("False the CUDA driver cannot be used"), done.stderr


def test_the_plugin_loads_no_driver() -> None:
    code = (
        "import sys, sleepbackends.cumem.plugin as plugin\n"
        "(spec,) = plugin.sleepbackends_register_backends()\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(spec.name, loaded & {'cuda', 'torch', 'numpy', 'ctypes'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "cumem"
    assert not {"cuda", "torch", "numpy"} & set(done.stdout.replace("'", " ").split()[1:])
