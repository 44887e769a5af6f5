"""Ask whether CUDA can be used here, without initialising it in a process that has not.

``cuInit`` cannot be undone, and what is forked from the process afterwards cannot use CUDA any
more, although engines fork their workers. So unless this process has initialised the driver
already, a short-lived one asks it: this module, run.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from sleepbackends.availability import Availability
from sleepbackends.cumem.driver import LIBRARY, CudaDriver, bindings_problem
from sleepbackends.errors import SleepBackendsError
from sleepbackends.vmm.address_space import library_path
from sleepbackends.vmm.probing import answer_whoever_asked, ask_elsewhere

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
    return (
        ask()
        if _is_initialised(driver) or _is_bad_fork()
        else ask_elsewhere(_NAME, "CUDA driver", "nvidia-smi")
    )


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


def main() -> None:
    """Ask the driver and write the answer to standard output."""
    answer_whoever_asked(_NAME, ask())


if __name__ == "__main__":
    main()
