"""Ask whether an Intel GPU can be used here, without initialising Level Zero in this process.

Run, this module asks the driver for another process.
"""

from __future__ import annotations

import ctypes
import sys

from sleepbackends.availability import Availability
from sleepbackends.errors import BackendUnavailableError, SleepBackendsError
from sleepbackends.vmm.probing import Asking, answer_whoever_asked, probe_driver, refusal
from sleepbackends.xpu.accelerator import XPU
from sleepbackends.xpu.driver import XpuDriver
from sleepbackends.xpu.errors import UNINITIALIZED
from sleepbackends.xpu.loader import INSTALL_HINT, LIBRARY
from sleepbackends.xpu.self_test import self_test

MODULE = "sleepbackends.xpu.probing"


def probe() -> Availability:
    """Tell whether there is a device that passes the self-test; see ``probe_driver``."""
    driver, tool = "Level Zero loader", "xpu-smi discovery"
    return probe_driver(
        Asking(MODULE, driver, LIBRARY, "level_zero", XPU, tool, INSTALL_HINT),
        is_initialised=_knows_drivers,
        ask=ask,
    )


def _knows_drivers(library: ctypes.CDLL) -> bool:
    count = ctypes.c_uint32()
    code: int = library.zeDriverGet(ctypes.byref(count), None)
    return code & 0xFFFFFFFF != UNINITIALIZED


def ask() -> Availability:
    """Test every device in this process, which initialises Level Zero; never raises.

    With torch's context where torch is there already, because the test is of what will be used.
    """
    try:
        torch = XPU.torch_if_there() if "torch" in sys.modules else None
        driver = XpuDriver(torch)
        if not driver.device_count:
            raise BackendUnavailableError(
                "Level Zero sees no GPU",
                hint="give the container its devices (/dev/dri); ZE_AFFINITY_MASK may hide some",
            )
        for device in range(driver.device_count):
            self_test(driver, device)
        driver.close()
    except SleepBackendsError as error:
        return refusal(error, XPU)
    names = ", ".join(driver.device(device).name for device in range(driver.device_count))
    return Availability(
        True, f"{driver.device_count} Intel GPU(s) with virtual memory management: {names}"
    )


if __name__ == "__main__":
    answer_whoever_asked(MODULE, ask())
