"""Put the simulated driver where ``cuda.bindings`` finds it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

import pytest

from tests.simulators.compiling import find_compiler
from tests.simulators.cuda.build import SONAME, build
from tests.simulators.cuda.controls import Simulator


def load(library: Path) -> Simulator:
    """Load the simulated driver into this process, for ``cuda.bindings`` and for a test.

    Whoever asks the system for ``libcuda.so.1`` afterwards gets this one, as a library of that
    name is loaded already.

    Raises
    ------
    RuntimeError
        Another driver of that name is loaded; nothing was changed.
    """
    other = _loaded_driver()
    if other is not None and not hasattr(other, "sim_reset"):
        msg = f"another {SONAME} is loaded in this process, probably a real driver"
        raise RuntimeError(msg)
    return Simulator(library)


def loaded_or_skip() -> Simulator:
    """Build and load the simulated driver, or skip the test that asked, saying why."""
    if find_compiler() is None:
        pytest.skip("the simulated CUDA driver needs a C compiler")
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-python is not installed")
    try:
        return load(build())
    except RuntimeError as error:
        if _loaded_driver() is None:
            raise  # it does not compile: a failure, not a reason to skip
        pytest.skip(str(error))


def environment(
    lib_dir: Path, devices: int = 1, total_bytes: int | None = None, shared: Path | None = None
) -> dict[str, str]:
    """Return this process's environment with the simulated driver in it, for a subprocess.

    Parameters
    ----------
    lib_dir
        The directory of the simulated ``libcuda.so.1``.
    devices
        How many devices there are, 0 to 16.
    total_bytes
        Memory of each device. None: 8 GiB.
    shared
        A file that processes name to share the devices' memory; see `SharedDevices`.
    """
    found = dict(os.environ)
    paths = [str(lib_dir), *filter(None, [found.get("LD_LIBRARY_PATH")])]
    found["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    found["SIMULATED_CUDA_DEVICES"] = str(devices)
    for name, value in (("TOTAL_BYTES", total_bytes), ("SHARED", shared)):
        found.pop(f"SIMULATED_CUDA_{name}", None)
        if value is not None:
            found[f"SIMULATED_CUDA_{name}"] = str(value)
    return found


def _loaded_driver() -> ctypes.CDLL | None:
    """Return the driver that is loaded already, without loading one."""
    try:
        return ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
