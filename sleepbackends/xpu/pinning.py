"""Host memory that the driver was told of, so that a device copies from and to it at full speed.

Intel's driver can import pages of the host. The two functions are not in the specification but
are the ones that Intel's own SYCL runtime uses
(https://github.com/oneapi-src/unified-runtime, ``zexDriverImportExternalPointer``), so they are
asked for by name and may be missing.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right, insort
from collections.abc import Collection
from typing import Any

from sleepbackends.errors import MechanismError
from sleepbackends.xpu.errors import error_of
from sleepbackends.xpu.loader import Loader

_IMPORT, _RELEASE = "zexDriverImportExternalPointer", "zexDriverReleaseImportedPointer"
_DRIVER = 0


class Pinning:
    """What was imported into every driver.

    Parameters
    ----------
    ze : Loader
        The loader.
    drivers : collection of int
        The handles of the drivers of all devices.
    """

    def __init__(self, ze: Loader, drivers: Collection[int]) -> None:
        self._ze = ze
        self._drivers = [_untranslated(ze, driver) for driver in drivers]
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._import = [self._function(each, _IMPORT, pointer, size) for each in drivers]
        self._release = [self._function(each, _RELEASE, pointer) for each in drivers]
        self._ranges: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def _function(self, driver: int, name: str, *arguments: Any) -> Any:
        found = ctypes.c_void_p()
        get = "zeDriverGetExtensionFunctionAddress"
        if self._ze.code(get, driver, name.encode(), ctypes.byref(found)) or not found.value:
            return None
        return ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p, *arguments)(found.value)

    def pin(self, host: int, size_bytes: int) -> None:
        """Import memory into every driver.

        Raises
        ------
        MechanismError, DeviceMemoryError
            If one cannot, or refuses; it is imported into none.
        """
        if None in self._import or None in self._release:
            raise MechanismError(f"the driver lacks {_IMPORT}", hint="update the Intel GPU driver")
        for number, driver in enumerate(self._drivers):
            code = self._import[number](driver, host, size_bytes)
            if code:
                for before in range(number):
                    self._release[before](self._drivers[before], host)
                raise error_of(code, "importing host memory", needed_bytes=size_bytes)
        with self._lock:
            insort(self._ranges, (host, size_bytes))

    def unpin(self, host: int) -> None:
        """Undo ``pin``.

        Raises
        ------
        MechanismError
            If a driver refuses; the memory counts as imported.
        """
        for driver, release in zip(self._drivers, self._release, strict=True):
            code = release(driver, host)
            if code:
                raise error_of(code, "giving up imported host memory")
        with self._lock:
            self._ranges = [each for each in self._ranges if each[0] != host]

    def covers(self, host: int, size_bytes: int) -> bool:
        """Tell whether all of some memory was imported, in one piece."""
        with self._lock:
            at = bisect_right(self._ranges, (host, 2**64)) - 1
            if at < 0:
                return False
            start, length = self._ranges[at]
            return host + size_bytes <= start + length


def _untranslated(ze: Loader, driver: int) -> int:
    """Return the driver's own handle, where the loader gives out others."""
    found = ctypes.c_void_p(driver)
    if ze.has("zelLoaderTranslateHandle"):
        ze.code("zelLoaderTranslateHandle", _DRIVER, driver, ctypes.byref(found))
    return found.value or driver
