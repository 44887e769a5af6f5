"""Which devices there are, with the handles that memory has to be made with.

Memory of one context is not to be used in another, so with torch the handles are those of
torch's own objects; without torch they are ours, made once in a process.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from sleepbackends.errors import BackendUnavailableError
from sleepbackends.xpu.accelerator import XPU
from sleepbackends.xpu.loader import (
    GPU,
    ContextDesc,
    DeviceProperties,
    Loader,
    MemoryProperties,
)
from sleepbackends.xpu.sycl import TorchHandles

MAX_MODULES = 16


class NativeDevice(ctypes.Structure):
    """What the native library is told of a device; see ``_native/driver_level_zero.c``."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("handle", ctypes.c_void_p),
        ("wait", ctypes.c_void_p),
        ("total", ctypes.c_size_t),
        ("modules", ctypes.c_void_p * MAX_MODULES),
        ("n_modules", ctypes.c_uint),
    )


@dataclass(frozen=True)
class Device:
    """One device and its handles.

    Parameters
    ----------
    driver, context, handle : int
        As Level Zero knows them.
    name : str
        What its maker calls it.
    uuid : bytes
        The same in every process.
    total_bytes : int
        How much memory it has.
    wait_pointer : int
        Address of ``void wait(int8_t device)``, which waits for what torch queued; 0 without
        torch.
    """

    driver: int
    context: int
    handle: int
    name: str
    uuid: bytes
    total_bytes: int
    wait_pointer: int = 0


def find_devices(ze: Loader, native: Any, torch: Any) -> list[Device]:
    """List the devices, in torch's order or in that of the drivers.

    Parameters
    ----------
    ze : Loader
        The loader.
    native : CDLL
        The native library, which remembers contexts.
    torch : module or None
        torch, if it has XPU devices.

    Raises
    ------
    BackendUnavailableError
        If there are none, or torch's handles cannot be had.
    MechanismError
        If a driver fails.
    """
    drivers = {
        handle: driver
        for driver in ze.handles("zeDriverGet")
        for handle in ze.handles("zeDeviceGet", driver)
        if _properties(ze, handle).type == GPU
    }
    if torch is not None:
        return _of_torch(ze, torch, drivers)
    contexts: dict[int, int] = {}
    found = []
    for number, (handle, driver) in enumerate(drivers.items()):
        if driver not in contexts:
            contexts[driver] = _known_context(native, number, handle) or ze.handle(
                "zeContextCreate", driver, ctypes.byref(ContextDesc())
            )
        found.append(_describe(ze, driver, contexts[driver], handle))
    return found


def _of_torch(ze: Loader, torch: Any, drivers: dict[int, int]) -> list[Device]:
    handles = TorchHandles(torch)
    found = []
    for number in range(XPU.of(torch).device_count()):
        context, handle = handles.of(number)
        if handle not in drivers:
            raise BackendUnavailableError(
                f"torch's {XPU.device_name(number)} is no device that Level Zero lists",
                hint="unset ONEAPI_DEVICE_SELECTOR and ZE_FLAT_DEVICE_HIERARCHY, or set "
                "ZE_AFFINITY_MASK instead",
            )
        found.append(_describe(ze, drivers[handle], context, handle, handles.wait_pointer))
    return found


def _known_context(native: Any, number: int, handle: int) -> int:
    known = NativeDevice()
    native.sb_known_device(number, ctypes.byref(known))
    return (known.context or 0) if known.handle == handle and not known.wait else 0


def _describe(ze: Loader, driver: int, context: int, handle: int, wait_pointer: int = 0) -> Device:
    properties = _properties(ze, handle)
    name = properties.name.decode(errors="replace")
    uuid = bytes(properties.uuid)
    return Device(driver, context, handle, name, uuid, _total_bytes(ze, handle), wait_pointer)


def _properties(ze: Loader, handle: int) -> Any:
    properties = DeviceProperties()
    ze.call("zeDeviceGetProperties", handle, ctypes.byref(properties))
    return properties


def _total_bytes(ze: Loader, handle: int) -> int:
    count = ctypes.c_uint32()
    ze.call("zeDeviceGetMemoryProperties", handle, ctypes.byref(count), None)
    found = (MemoryProperties * count.value)()
    for each in found:
        each.stype = MemoryProperties.TYPE
    ze.call("zeDeviceGetMemoryProperties", handle, ctypes.byref(count), found)
    return sum(each.total for each in found[: count.value])
