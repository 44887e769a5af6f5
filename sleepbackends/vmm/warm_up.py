"""What the first suspend of a process has to wait for, done while the engine loads.

Kernels that were never compiled on a machine take more than a second, and loading compiled ones
50 ms of a device: more than the sleep of weights that did not change takes.
"""

from __future__ import annotations

import logging
import threading

from sleepbackends.errors import SleepBackendsError
from sleepbackends.vmm.driver import Driver

logger = logging.getLogger(__name__)


class WarmUp:
    """Has the kernels of each device compiled and loaded once, in the background.

    Whoever needs them meanwhile waits for that, as if it had been the first. Python's exit waits
    for it too.

    Parameters
    ----------
    driver : Driver
        Has them.
    packs : bool
        Whether those that pack will be needed.
    """

    def __init__(self, driver: Driver, *, packs: bool) -> None:
        self._driver = driver
        self._packs = packs
        self._lock = threading.Lock()
        self._threads: dict[int, threading.Thread] = {}
        self._is_closed = False

    def begin(self, device: int) -> None:
        """Begin with a device, unless that was done before."""
        with self._lock:
            if device in self._threads or self._is_closed:
                return
            thread = threading.Thread(
                target=self._run, args=[device], name="sleepbackends-warm-up", daemon=False
            )
            try:
                thread.start()
            except RuntimeError as error:  # no more threads, or Python is ending
                logger.debug("the kernels of device %d are not made ready: %s", device, error)
                return
            self._threads[device] = thread

    def close(self) -> None:
        """Begin nothing any more, and wait for what has begun."""
        with self._lock:
            self._is_closed = True
        for thread in self._threads.values():
            thread.join()

    def _run(self, device: int) -> None:
        try:
            with self._driver.aside():
                self._driver.get_ready(device, packing=self._packs)
        except SleepBackendsError as error:
            # The first suspend tries again, and tells.
            logger.debug("the kernels of device %d are not ready: %s", device, error)
