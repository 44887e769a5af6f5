"""The ways to native handles on objects of Intel's own SYCL library, where that is installed.

``pip install intel-sycl-rt`` brings it. It needs a newer Level Zero loader than Debian 12 has, with
which it crashes.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulators.level_zero import environment
from tests.simulators.level_zero.loading import LOADER

SOURCE = Path(__file__).with_name("sycl_objects.cpp")
PREFIX = Path(sys.prefix)
DEVICES = 2

SCRIPT = """
import ctypes, json, sys
from types import SimpleNamespace
objects = ctypes.CDLL(sys.argv[1])
for name in ("make_queue", "make_stray_queue", "native_context", "native_device"):
    getattr(objects, name).restype = ctypes.c_size_t
make = getattr(objects, sys.argv[2])
stream = lambda device=0: SimpleNamespace(sycl_queue=make(device))
xpu = SimpleNamespace(current_stream=stream, device_count=objects.count_devices)
from sleepbackends.errors import BackendUnavailableError
from sleepbackends.xpu.sycl import TorchHandles
handles = TorchHandles(SimpleNamespace(xpu=xpu))
try:
    found = [handles.of(device) for device in range(objects.count_devices())]
except BackendUnavailableError as error:
    found = error.message
expected = [
    [objects.native_context(), objects.native_device(device)]
    for device in range(objects.count_devices())
]
print(json.dumps({"found": found, "expected": expected}))
"""


def obstacle() -> str:
    """Say why the runtime cannot be used here; empty if it can."""
    try:
        importlib.metadata.version("intel-sycl-rt")
    except importlib.metadata.PackageNotFoundError:
        return "intel-sycl-rt is not installed"
    if shutil.which("g++") is None:
        return "there is no g++"
    if not hasattr(ctypes.CDLL(LOADER), "zeInitDrivers"):
        return f"{LOADER} is older than what intel-sycl-rt works with"
    return ""


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why := obstacle():
        pytest.skip(why)
    library = tmp_path_factory.mktemp("sycl") / "libc10_xpu.so"
    flags = ["-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-deprecated"]
    places = [f"-I{PREFIX / 'include'}", f"-L{PREFIX / 'lib'}", f"-Wl,-rpath,{PREFIX / 'lib'}"]
    command = ["g++", *flags, "-DSYCL_DISABLE_FSYCL_SYCLHPP_WARNING", *places]
    output = ["-Wl,-soname,libc10_xpu.so", "-o", str(library), str(SOURCE), "-lsycl"]
    done = subprocess.run([*command, *output], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library


def run(objects: Path, queues: str) -> dict[str, object]:
    env = environment(DEVICES) | {
        "ONEAPI_DEVICE_SELECTOR": "level_zero:gpu",
        # The other adapter uses parts of the driver that the simulated one does not have.
        "SYCL_UR_USE_LEVEL_ZERO_V2": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", SCRIPT, str(objects), queues]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_both_ways_lead_to_what_sycl_itself_says(objects: Path) -> None:
    answer = run(objects, "make_queue")
    assert answer["found"] == answer["expected"]


def test_a_queue_in_another_context_is_refused(objects: Path) -> None:
    assert "do not belong together" in str(run(objects, "make_stray_queue")["found"])
