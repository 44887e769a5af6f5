"""The kernels of one source, compiled and loaded on one device."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sleepbackends.cumem.nvrtc import KernelSource
from sleepbackends.errors import MechanismError, SleepBackendsError

if TYPE_CHECKING:
    from sleepbackends.cumem.driver import CudaDriver

logger = logging.getLogger(__name__)


class Module:
    """Loads kernels: those that are kept on disk, or newly compiled ones.

    Parameters
    ----------
    driver : CudaDriver
        Loads.
    device : int
        Ordinal of the device.
    source : KernelSource
        What the kernels are compiled from.
    names : iterable of str
        Of the kernels.

    Raises
    ------
    SleepBackendsError
        If they cannot be had; nothing is held.
    """

    def __init__(
        self, driver: CudaDriver, device: int, source: KernelSource, names: Iterable[str]
    ) -> None:
        self._driver = driver
        self._device = device
        self._name = source.name
        self._names = tuple(names)
        compiler, architecture = driver.compiler, driver.architecture(device)
        image = compiler.image(source, architecture)
        try:
            self._load(image)
        except MechanismError as error:
            # One that was kept on disk may be of no use to this driver.
            other = compiler.other_than(image, source, architecture)
            if other is None:
                raise
            logger.debug("the kernels that were kept cannot be loaded: %s", error.message)
            self._load(other)

    def __getitem__(self, name: str) -> Any:
        """Return a kernel."""
        return self._functions[name]

    def _load(self, image: bytes) -> None:
        cu, call = self._driver._cu, self._driver.call
        with self._driver.current(self._device):
            self._module = call(cu.cuModuleLoadData, image)
            try:
                self._functions = {
                    name: call(cu.cuModuleGetFunction, self._module, name.encode())
                    for name in self._names
                }
            except SleepBackendsError:
                self.unload()
                raise

    def unload(self) -> None:
        """Give it up, once nothing of it is running; a failure is logged."""
        try:
            with self._driver.current(self._device):
                self._driver.call(self._driver._cu.cuModuleUnload, self._module)
        except SleepBackendsError:
            logger.exception("the kernels %s of device %d stay", self._name, self._device)
