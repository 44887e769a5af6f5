"""Ask whether CUDA can be used here, without initialising it in a process that has not.

``cuInit`` cannot be undone, and what is forked from the process afterwards cannot use CUDA any
more, although engines fork their workers. So unless this process has initialised the driver
already, a short-lived one asks it: this module, run.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from sleepbackends.availability import Availability
from sleepbackends.cumem.driver import LIBRARY, CudaDriver, bindings_problem
from sleepbackends.errors import SleepBackendsError
from sleepbackends.interpreter import python_command
from sleepbackends.vmm.address_space import library_path

TIMEOUT_S = 60.0
"""A driver without persistence mode takes seconds for each device, a hung one for ever."""

_NAME = "sleepbackends.cumem.probing"

_NOT_INITIALIZED = 3


def probe() -> Availability:
    """Tell whether there is a device with virtual memory management, and what it needs.

    Never raises, creates no context, and initialises no driver in this process: a child asks
    where this process has not done that before. In a process that was forked from one that
    had, the answer is no where torch knows of the fork, else that of a fresh process.
    """
    problem = bindings_problem()
    if problem is not None:
        return problem
    try:
        library_path("cuda")
    except SleepBackendsError as error:
        return Availability(False, error.message, error.hint)
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError as error:
        return Availability(
            False,
            f"the CUDA driver cannot be loaded: {error}",
            "install the NVIDIA driver, or give the container its devices (--gpus all)",
        )
    return ask() if _is_initialised(driver) or _is_bad_fork() else _ask_elsewhere()


def _is_initialised(driver: ctypes.CDLL) -> bool:
    try:
        get_count = driver.cuDeviceGetCount
    except AttributeError:
        return False
    return bool(get_count(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


def _is_bad_fork() -> bool:
    # The driver itself answers there as if nobody had initialised it.
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return bool(getattr(cuda, "_is_in_bad_fork", bool)())


def ask() -> Availability:
    """Ask the driver in this process, which initialises it; never raises."""
    try:
        driver = CudaDriver()
        count = driver.device_count
        able = [device for device in range(count) if driver.supports_virtual_memory(device)]
    except SleepBackendsError as error:
        hint = "start the process with spawn instead of fork" if _is_bad_fork() else error.hint
        return Availability(False, error.message, hint)
    if not able:
        return Availability(
            False,
            f"none of {count} CUDA devices has virtual memory management",
            "use a device of compute capability 6.0 or newer with a current driver",
        )
    return Availability(True, f"{len(able)} CUDA device(s) with virtual memory management")


def _ask_elsewhere() -> Availability:
    try:
        done = subprocess.run(  # noqa: S603 - runs this module
            python_command(_NAME),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except SleepBackendsError as error:
        return Availability(False, f"the CUDA driver was not asked: {error.message}", error.hint)
    except subprocess.TimeoutExpired:
        return Availability(
            False,
            f"the CUDA driver did not answer within {TIMEOUT_S:g} s",
            "see whether nvidia-smi answers; a driver that hangs needs a restart",
        )
    except (OSError, ValueError) as error:
        return Availability(
            False,
            f"the CUDA driver was not asked: no process could be started: {error}",
            f"see that {sys.executable} is a Python and that this process may start others",
        )
    # Whatever runs when Python starts may write there too, and so may the driver.
    for line in reversed(_lines(done.stdout)):
        if _NAME in line:
            try:
                return Availability(**json.loads(line)[_NAME])
            except (ValueError, TypeError, LookupError):
                break
    said = (_lines(done.stderr) or _lines(done.stdout) or ["nothing"])[-1]
    return Availability(
        False,
        f"the process that was to ask the CUDA driver ended with exit code {done.returncode} "
        f"and no answer, but said: {said}",
        f"see what this prints: {sys.executable} -m {_NAME}",
    )


def _lines(output: bytes) -> list[str]:
    return [line for line in output.decode(errors="replace").splitlines() if line.strip()]


def main() -> None:
    """Ask the driver and write the answer to standard output, as a line of JSON."""
    sys.stdout.write(f"\n{json.dumps({_NAME: asdict(ask())})}\n")


if __name__ == "__main__":
    main()
