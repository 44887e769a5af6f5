"""What the device says of its memory, where Level Zero's system management can be asked.

There are two ways: a function that initialises it, since version 1.5, and before that an
environment variable, ``ZES_ENABLE_SYSMAN=1``, that had to be set before Level Zero was initialised
(https://oneapi-src.github.io/level-zero-spec/level-zero/latest/sysman/PROG.html). Nobody has to
have it: without it our own books say how much is left.
"""

from __future__ import annotations

import ctypes
import logging
import os

from sleepbackends.errors import SleepBackendsError
from sleepbackends.xpu.devices import MAX_MODULES, Device
from sleepbackends.xpu.errors import SUCCESS
from sleepbackends.xpu.loader import Loader, SysmanDeviceProperties

logger = logging.getLogger(__name__)


def memory_modules(ze: Loader, device: Device) -> list[int]:
    """List the handles of a device's memory modules; none if nobody can be asked."""
    try:
        for handle in _candidates(ze, device):
            modules = ze.handles("zesDeviceEnumMemoryModules", handle)
            return modules if len(modules) <= MAX_MODULES else []
    except SleepBackendsError as error:
        logger.info("the free memory of %s is not known: %s", device.name, error.message)
    return []


def _candidates(ze: Loader, device: Device) -> list[int]:
    """List the handles under which system management knows the device: one or none."""
    if ze.has("zesInit") and ze.code("zesInit", 0) == SUCCESS:
        return [
            handle
            for driver in ze.handles("zesDriverGet")
            for handle in ze.handles("zesDeviceGet", driver)
            if _uuid(ze, handle) == device.uuid
        ]
    return [device.handle] if os.environ.get("ZES_ENABLE_SYSMAN") == "1" else []


def _uuid(ze: Loader, handle: int) -> bytes:
    properties = SysmanDeviceProperties()
    properties.core.stype = type(properties.core).TYPE
    ze.call("zesDeviceGetProperties", handle, ctypes.byref(properties))
    return bytes(properties.core.uuid)
