"""Have Intel's real loader load the simulated driver."""

from __future__ import annotations

import ctypes
import functools
import os

from tests.simulators.level_zero.build import build
from tests.simulators.level_zero.controls import Simulator

LOADER = "libze_loader.so.1"

_DRIVERS, _SYSMAN = "ZE_ENABLE_ALT_DRIVERS", "ZES_ENABLE_SYSMAN"


@functools.cache
def load() -> Simulator:
    """Load the driver into this process; it has no devices until a test asks for some.

    Raises
    ------
    RuntimeError
        The loader is missing, or has already loaded another driver. That is a failure of the
        tests and no reason to skip them: `make system-packages` installs the loader.
    """
    library = build()
    # Only while the loader looks: processes that other tests start have no such driver.
    before = {name: os.environ.get(name) for name in (_DRIVERS, _SYSMAN)}
    os.environ.update({_DRIVERS: str(library), _SYSMAN: "1"})
    try:
        loader = ctypes.CDLL(LOADER)
        code = loader.zeInit(1) & 0xFFFFFFFF
    except OSError as error:
        msg = f"{error}; run 'make system-packages', or install libze1"
        raise RuntimeError(msg) from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    simulator = Simulator(library)
    if code or not simulator.calls("zeInit"):
        msg = f"{LOADER} has not loaded the simulated driver: {code:#x}"
        raise RuntimeError(msg)
    return simulator


def environment(devices: int = 1, total_bytes: int | None = None) -> dict[str, str]:
    """Return this process's environment with the simulated driver in it, for a subprocess."""
    found = dict(os.environ)
    found |= {_DRIVERS: str(build()), _SYSMAN: "1", "SIMULATED_ZE_DEVICES": str(devices)}
    if total_bytes is not None:
        found["SIMULATED_ZE_TOTAL_BYTES"] = str(total_bytes)
    return found
