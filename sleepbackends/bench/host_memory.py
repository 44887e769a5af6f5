"""Host memory that the machine has given once, so that no measurement has to wait for it."""

from __future__ import annotations

import logging
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil

from sleepbackends.errors import HostMemoryError
from sleepbackends.host_limits import host_memory
from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm.driver import Driver

logger = logging.getLogger(__name__)

MIB = 1 << 20
GIB = 1 << 30

PIECE_BYTES = 64 * MIB
"""What one thread touches at a time."""

STEP_BYTES = GIB
LEFT_SHARE = 8
"""One part in so many of the machine's memory is left to others."""

GROWTH_S = 5.0
"""How long memory may take to grow once it is short."""

POLL_S = 0.1


def touch_host_memory(
    size_bytes: int, driver: Driver | None = None, *, until: float = math.inf
) -> int:
    """Have the machine give this much memory once; return how much it gave.

    The memory of a virtual machine may be small at first and grow as it is used: what is not there
    yet cannot be asked for. It may take longer when it is touched for the first time, and several
    times as long when it is registered for the first time, which would be counted against whoever
    needs it first.

    Parameters
    ----------
    size_bytes : int
        How much is wanted.
    driver : Driver, optional
        Registers it, as far as that is allowed.
    until : float
        When to stop, by ``time.monotonic``.
    """
    found = 0
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))
        try:
            while found < size_bytes and _comes(until):
                step_bytes = host.round_up(min(STEP_BYTES, size_bytes - found))
                address = host.reserve(step_bytes)
                stack.callback(host.release, address, step_bytes)
                host.map_memory(address, step_bytes)
                pieces = range(0, step_bytes, PIECE_BYTES)
                ends = [(address + at, min(PIECE_BYTES, step_bytes - at)) for at in pieces]
                list(pool.map(host.populate, *zip(*ends, strict=True)))
                found += step_bytes
                if driver is not None and not _pinned(driver, address, step_bytes, stack):
                    driver = None
        except HostMemoryError as error:
            logger.info("there is no more host memory: %s", error.message)
    return found


def _pinned(driver: Driver, address: int, size_bytes: int, stack: ExitStack) -> bool:
    """Register memory until a stack is closed; tell whether that is allowed."""
    try:
        driver.pin(address, size_bytes)
    except HostMemoryError as error:
        logger.info("not all host memory was registered before: %s", error.message)
        return False
    stack.callback(driver.unpin, address)
    return True


def _comes(until: float) -> bool:
    """Wait until there is memory for a step; tell whether there is."""
    until = min(until, time.monotonic() + GROWTH_S)
    while time.monotonic() < until:
        memory, total_bytes = host_memory(), psutil.virtual_memory().total
        left_bytes = min(total_bytes, memory.limit_bytes or total_bytes) // LEFT_SHARE
        if memory.available_bytes >= STEP_BYTES + left_bytes:
            return True
        time.sleep(POLL_S)
    return False
