"""What a machine does once, so that no measurement has to wait for it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from sleepbackends.bench.host_memory import touch_host_memory
from sleepbackends.vmm.driver import Driver


def do_once(
    size_bytes: int, driver: Driver, devices: Iterable[int] = (0,), *, until: float = math.inf
) -> int:
    """Have kernels compiled and kept, and host memory given once; return how much of it.

    Kernels that were never compiled on a machine take more than a second: a backend has that done
    in the background from its first region on, and a suspend that comes sooner neither packs nor
    compares. For host memory see ``touch_host_memory``.

    Parameters
    ----------
    size_bytes : int
        How much host memory is wanted.
    driver : Driver
        Has the kernels, and registers host memory as far as that is allowed.
    devices : iterable of int
        The devices whose kernels are wanted.
    until : float
        When to stop touching memory, by ``time.monotonic``.
    """
    for device in devices:
        driver.compile(device, "fingerprint")
        driver.compile(device, "packing")
    return touch_host_memory(size_bytes, driver, until=until)
