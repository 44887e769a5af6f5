"""What the first suspend of a process would have to wait for, done while the engine loads.

Kernels that were never compiled on a machine take more than a second, and the first look for
compiled ones and their loading 0.1 s: more than the sleep of weights that did not change takes. So
nobody in a hurry waits for the compiler. And nothing is loaded while memory is away: what that
takes might be missing when the memory is to come back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterable
from itertools import product

from sleepbackends.errors import SleepBackendsError
from sleepbackends.vmm.driver import Driver, KernelUse

logger = logging.getLogger(__name__)


class WarmUp:
    """Has the kernels of each device compiled and loaded once, in the background.

    Python's exit waits for it.

    Parameters
    ----------
    driver : Driver
        Has them.
    packs : bool
        Whether those that pack will be needed.
    """

    def __init__(self, driver: Driver, *, packs: bool) -> None:
        self._driver = driver
        self._uses: list[KernelUse] = ["fingerprint", "packing"] if packs else ["fingerprint"]
        self._threads: dict[int, threading.Thread] = {}
        # Held while kernels are loaded.
        self._lock = threading.Lock()
        self._missing: dict[tuple[int, KernelUse], bool] = {}
        """By device and use, whether they are compiled."""
        self._away: set[int] = set()
        self._is_closed = False

    def begin(self, device: int) -> None:
        """Begin with a device, unless that was done before."""
        if device in self._threads:
            return
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
            self._missing |= {(device, use): False for use in self._uses}

    def lacks(self, device: int, use: KernelUse) -> bool:
        """Tell whether kernels are on their way, so that asking the driver for them may take long.

        What is being loaded at the moment is waited for.
        """
        with self._lock:
            return (device, use) in self._missing

    def wait(self, devices: Iterable[int]) -> None:
        """Wait until nothing is being compiled or loaded for these devices."""
        for device in devices:
            thread = self._threads.get(device)
            if thread is not None:
                thread.join()

    def memory_goes(self, devices: Container[int]) -> None:
        """Load nothing on these devices until ``memory_is_back``."""
        with self._lock:
            self._away.update(device for device, _ in self._missing if device in devices)

    def memory_is_back(self, is_away: Callable[[int], bool]) -> None:
        """Load what was compiled meanwhile, and from now on what will be.

        Parameters
        ----------
        is_away : callable
            Tells of which devices memory is still away; asked only where that matters.
        """
        if not self._away:
            return
        with self._lock:
            back = [device for device in self._away if not is_away(device)]
            self._away.difference_update(back)
            for device, use in product(back, self._uses):
                if self._missing.get((device, use)):
                    self._load(device, use)

    def close(self) -> None:
        """Begin nothing any more, and wait for what has begun."""
        with self._lock:
            self._is_closed = True
        self.wait(self._threads)

    def _run(self, device: int) -> None:
        try:
            with self._driver.aside():
                for use in self._uses:
                    self._driver.compile(device, use)
                    with self._lock:
                        self._missing[device, use] = True
                        if device not in self._away:
                            self._load(device, use)
        except SleepBackendsError as error:
            logger.debug("the kernels of device %d are not made ready: %s", device, error)
        finally:
            with self._lock:
                for use in self._uses:
                    if not self._missing.get((device, use), True):
                        del self._missing[device, use]

    def _load(self, device: int, use: KernelUse) -> None:
        try:
            self._driver.load(device, use)
        except SleepBackendsError as error:
            # The next suspend tries again, and tells.
            logger.debug("the kernels for %s of device %d are not there: %s", use, device, error)
        del self._missing[device, use]
