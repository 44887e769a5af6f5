"""Ask whether CUDA can be used here, without initialising it in a process that has not.

Run, this module asks the driver for another process.
"""

from __future__ import annotations

import ctypes

from sleepbackends.availability import Availability
from sleepbackends.cuda_bindings import bindings_problem
from sleepbackends.cumem.accelerator import CUDA
from sleepbackends.cumem.driver import LIBRARY, CudaDriver
from sleepbackends.errors import SleepBackendsError
from sleepbackends.vmm.probing import Asking, answer_whoever_asked, probe_driver, refusal

_NAME = "sleepbackends.cumem.probing"

_HINT = "install the NVIDIA driver, or give the container its devices (--gpus all)"

_NOT_INITIALIZED = 3


def probe() -> Availability:
    """Tell whether there is a device with virtual memory management, and what it needs.

    Never raises, creates no context, and initialises no driver in this process; see
    ``probe_driver``.
    """
    problem = bindings_problem()
    if problem is not None:
        return problem
    asking = Asking(_NAME, "CUDA driver", LIBRARY, "cuda", CUDA, "nvidia-smi", _HINT)
    return probe_driver(asking, _is_initialised, ask)


def _is_initialised(driver: ctypes.CDLL) -> bool:
    try:
        get_count = driver.cuDeviceGetCount
    except AttributeError:
        return False
    return bool(get_count(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED)


def ask() -> Availability:
    """Ask the driver in this process, which initialises it; never raises."""
    try:
        driver = CudaDriver()
        count = driver.device_count
        able = [device for device in range(count) if driver.supports_virtual_memory(device)]
    except SleepBackendsError as error:
        return refusal(error, CUDA)
    if not able:
        return Availability(
            False,
            f"none of {count} CUDA devices has virtual memory management",
            "use a device of compute capability 6.0 or newer with a current driver",
        )
    return Availability(True, f"{len(able)} CUDA device(s) with virtual memory management")


if __name__ == "__main__":
    answer_whoever_asked(_NAME, ask())
