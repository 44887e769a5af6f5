"""What the probe answers, whom it asks, and that it never raises."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sleepbackends import cuda_bindings
from sleepbackends.availability import Availability
from sleepbackends.cumem import probing
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.errors import BackendUnavailableError
from sleepbackends.vmm import address_space
from sleepbackends.vmm import probing as elsewhere
from tests.simulators.cuda import Simulator, build, environment

Children = Callable[[int], None]


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
    monkeypatch.setattr(cuda_bindings, "version", lambda _: text)
    problem = cuda_bindings.bindings_problem()
    assert (problem is None) == good
    if problem is not None:
        assert text in problem.reason
        assert "sleepbackends[cuda]" in problem.hint


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(elsewhere, "python_command", refuse)


@pytest.fixture
def children(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> Children:
    """Gives the processes that the probe starts a simulated driver with so many devices."""

    def give(devices: int) -> None:
        for name, value in environment(build().parent, devices).items():
            monkeypatch.setenv(name, value)

    give(2)
    return give


def test_without_bindings(monkeypatch: pytest.MonkeyPatch, no_child: None) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cuda_bindings, "version", missing)
    answer = CumemBackend.probe()
    assert not answer.ok
    assert "not installed" in answer.reason
    with pytest.raises(BackendUnavailableError, match="not installed"):
        CumemBackend()


def test_old_bindings(monkeypatch: pytest.MonkeyPatch, no_child: None) -> None:
    monkeypatch.setattr(cuda_bindings, "version", lambda _: "12.8.0")
    assert "GIL" in CumemBackend.probe().reason


def test_bindings_that_cannot_be_imported(
    children: Children, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cuda.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    answer = CumemBackend.probe()
    assert not answer.ok
    assert "cannot be imported" in answer.reason
    assert "reinstall" in answer.hint


def test_without_a_native_library(
    simulator: Simulator, no_child: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(address_space, "_FOLDER", tmp_path)
    answer = CumemBackend.probe()
    assert not answer.ok
    assert "was not built" in answer.reason
    assert "C compiler" in answer.hint


def test_without_a_driver(
    simulator: Simulator, no_child: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "LIBRARY", "libcuda-absent.so.1")
    answer = CumemBackend.probe()
    assert not answer.ok
    assert answer.reason.startswith("the CUDA driver cannot be loaded: libcuda-absent.so.1")
    assert "install the NVIDIA driver" in answer.hint


def test_a_driver_of_another_kind(
    children: Children, no_child: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that lacks what is asked first is not initialised, so a process is to ask it."""
    monkeypatch.setattr(probing, "LIBRARY", "libc.so.6")
    with pytest.raises(AssertionError, match="a process was started"):
        CumemBackend.probe()


# Where this process has not initialised the driver, another one asks


def test_without_a_device(children: Children) -> None:
    children(0)
    answer = CumemBackend.probe()
    assert not answer.ok
    assert "NO_DEVICE" in answer.reason


def test_another_process_asks_in_this_environment(children: Children, simulator: Simulator) -> None:
    for count in (1, 3):
        children(count)
        assert CumemBackend.probe() == Availability(
            True, f"{count} CUDA device(s) with virtual memory management"
        )
    assert simulator.calls("cuInit") == 0


FRESH = """
import ctypes, os, sys
from pathlib import Path
from sleepbackends.vmm import address_space
from sleepbackends.vmm import probing as elsewhere
from sleepbackends.cumem.probing import probe
address_space._FOLDER = Path(sys.argv[1])
answer = probe()
driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
driver.sim_calls.restype = ctypes.c_int64
assert driver.sim_calls(b"cuDeviceGetCount") == 1
assert driver.sim_calls(b"cuInit") == 0, "a worker that is forked now cannot use CUDA"
print(answer.reason)
"""


def test_it_initialises_no_driver_in_a_fresh_process(native_library: Path) -> None:
    assert run_fresh(FRESH, native_library) == "1 CUDA device(s) with virtual memory management"


FORKED = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from sleepbackends.vmm import address_space
from sleepbackends.vmm import probing as elsewhere
from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.cumem.probing import probe
address_space._FOLDER = Path(sys.argv[1])
CudaDriver()
if os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
fresh = probe()
sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(_is_in_bad_fork=lambda: True))
forked = probe()
print(fresh.ok, forked.ok, forked.hint, "NOT_INITIALIZED" in forked.reason, flush=True)
os._exit(0)
"""


def test_in_a_process_that_was_forked_too_late(native_library: Path) -> None:
    """Torch knows; the driver itself answers as if it had just been loaded."""
    said = run_fresh(FORKED, native_library)
    assert said == "True False start the process with spawn instead of fork True"


def run_fresh(code: str, native_library: Path) -> str:
    """Run code in a process with the simulated driver, and return what it wrote."""
    done = subprocess.run(
        [sys.executable, "-c", code, str(native_library.parent)],
        env=environment(build().parent),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("shell", "reason"),
    [
        ("exit 0", "exit code 0 and no answer, but said: nothing"),
        ("echo one; echo two; exit 3", "exit code 3 and no answer, but said: two"),
        ("echo noise; echo 'no such library' >&2; exit 1", "but said: no such library"),
        ("kill -SEGV $$", "exit code -11"),
        ("""echo '{"sleepbackends.cumem.probing": []'""", "exit code 0"),
        ("""echo '{"sleepbackends.cumem.probing": {"okay": 1}}'""", "exit code 0"),
        ("""echo '{"a": "sleepbackends.cumem.probing"}'""", "exit code 0"),
        (r"printf 'sleepbackends.cumem.probing \377\n'", "exit code 0"),
        ("exec sleep 60", "did not answer within 0.5 s"),
    ],
)
def test_a_process_that_gives_no_answer(
    children: Children, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shell: str, reason: str
) -> None:
    executable = tmp_path / "python"
    executable.write_text(f"#!/bin/sh\n{shell}\n")
    executable.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(executable))
    monkeypatch.setattr(elsewhere, "TIMEOUT_S", 0.5 if "sleep 60" in shell else 30.0)
    answer = CumemBackend.probe()
    assert not answer.ok
    assert reason in answer.reason
    assert answer.hint


def test_a_process_gets_no_input(
    children: Children, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    executable = tmp_path / "python"
    executable.write_text("#!/bin/sh\ncat\n")
    executable.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(executable))
    typed, keyboard = os.pipe()
    before = os.dup(0)
    os.dup2(typed, 0)
    os.write(keyboard, b"typed")
    os.close(keyboard)
    try:
        assert "but said: nothing" in CumemBackend.probe().reason
    finally:
        os.dup2(before, 0)
        for descriptor in (typed, before):
            os.close(descriptor)


@pytest.mark.parametrize("executable", [None, "", "/absent/python", os.devnull])
def test_without_a_python_to_start(
    children: Children, monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    answer = CumemBackend.probe()
    assert not answer.ok
    assert answer.reason.startswith("the CUDA driver was not asked: ")
    assert str(executable) in answer.reason + answer.hint


def test_an_answer_among_noise_is_found(
    children: Children, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit\nprint('begin', end='')\natexit.register(print, '{\"end\": 1}')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert CumemBackend.probe().ok


# Where it has, that does no harm and needs no process


def test_devices_without_virtual_memory(simulator: Simulator, no_child: None) -> None:
    CudaDriver()
    for device in (0, 1):
        simulator.set_attribute(102, 0, device)
    answer = CumemBackend.probe()
    assert not answer.ok
    assert "none of 2" in answer.reason
    simulator.set_attribute(102, 1, 1)
    assert CumemBackend.probe().ok


def test_it_creates_no_context(simulator: Simulator, no_child: None) -> None:
    CudaDriver()
    assert CumemBackend.probe().ok
    assert simulator.calls("cuDevicePrimaryCtxRetain") == 0


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
