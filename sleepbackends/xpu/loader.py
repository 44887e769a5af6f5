"""Intel's Level Zero loader through ``ctypes``: the functions and structs that we use.

Layouts and numbers are those of the specification since version 1.0
(https://oneapi-src.github.io/level-zero-spec/level-zero/latest/core/api.html). What came later
is looked up and may be missing. Calls let other Python threads run.
"""

from __future__ import annotations

import ctypes
from typing import Any

from sleepbackends.errors import BackendUnavailableError
from sleepbackends.xpu.errors import SUCCESS, UNINITIALIZED, error_of, name_of

LIBRARY = "libze_loader.so.1"

INSTALL_HINT = (
    "install Intel's GPU driver and the Level Zero loader "
    "(Debian and Ubuntu: apt-get install libze1), and give the container its devices (/dev/dri)"
)

GPU_ONLY = 1
GPU = 1
SYNCHRONOUS, ASYNCHRONOUS = 1, 2
FOR_EVER = 2**64 - 1

_POINTER, _U32, _U64, _SIZE = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "zeInit": (_U32,),
    "zeDriverGet": (_POINTER, _POINTER),
    "zeDriverGetExtensionFunctionAddress": (_POINTER, ctypes.c_char_p, _POINTER),
    "zeDeviceGet": (_POINTER, _POINTER, _POINTER),
    "zeDeviceGetProperties": (_POINTER, _POINTER),
    "zeDeviceGetMemoryProperties": (_POINTER, _POINTER, _POINTER),
    "zeDeviceGetCommandQueueGroupProperties": (_POINTER, _POINTER, _POINTER),
    "zeContextCreate": (_POINTER, _POINTER, _POINTER),
    "zeMemGetAllocProperties": (_POINTER, _POINTER, _POINTER, _POINTER),
    "zeCommandListCreateImmediate": (_POINTER, _POINTER, _POINTER, _POINTER),
    "zeCommandListDestroy": (_POINTER,),
    "zeCommandListAppendMemoryCopy": (*(_POINTER,) * 3, _SIZE, _POINTER, _U32, _POINTER),
    "zeCommandListAppendMemoryFill": (*(_POINTER,) * 3, _SIZE, _SIZE, _POINTER, _U32, _POINTER),
    "zeCommandListAppendBarrier": (_POINTER, _POINTER, _U32, _POINTER),
    "zeEventPoolCreate": (_POINTER, _POINTER, _U32, _POINTER, _POINTER),
    "zeEventPoolDestroy": (_POINTER,),
    "zeEventCreate": (_POINTER, _POINTER, _POINTER),
    "zeEventDestroy": (_POINTER,),
    "zeEventHostReset": (_POINTER,),
    "zeEventHostSignal": (_POINTER,),
    "zeEventHostSynchronize": (_POINTER, _U64),
    "zeEventQueryStatus": (_POINTER,),
    "zesDeviceEnumMemoryModules": (_POINTER, _POINTER, _POINTER),
    "zesDeviceGetProperties": (_POINTER, _POINTER),
}

_NEWER: dict[str, tuple[Any, ...]] = {
    "zelLoaderTranslateHandle": (_U32, _POINTER, _POINTER),
    "zesInit": (_U32,),
    "zesDriverGet": (_POINTER, _POINTER),
    "zesDeviceGet": (_POINTER, _POINTER, _POINTER),
}


class Struct(ctypes.Structure):
    """What the interface passes around: begins with its type and a chain of extensions."""

    TYPE = 0

    def __init__(self, **values: int) -> None:
        super().__init__(stype=self.TYPE, **values)


def _struct(*fields: tuple[str, Any]) -> list[tuple[str, Any]]:
    return [("stype", _U32), ("next", _POINTER), *fields]


class ContextDesc(Struct):
    """``ze_context_desc_t``."""

    TYPE = 0xD
    _fields_ = _struct(("flags", _U32))


class QueueDesc(Struct):
    """``ze_command_queue_desc_t``."""

    TYPE = 0xE
    _fields_ = _struct(
        *((name, _U32) for name in ("ordinal", "index", "flags", "mode", "priority"))
    )


class EventPoolDesc(Struct):
    """``ze_event_pool_desc_t``."""

    TYPE = 0x10
    _fields_ = _struct(("flags", _U32), ("count", _U32))


class EventDesc(Struct):
    """``ze_event_desc_t``."""

    TYPE = 0x11
    _fields_ = _struct(("index", _U32), ("signal", _U32), ("wait", _U32))


class QueueGroup(Struct):
    """``ze_command_queue_group_properties_t``."""

    TYPE = 0x6
    _fields_ = _struct(("flags", _U32), ("pattern", _SIZE), ("queues", _U32))


class MemoryProperties(Struct):
    """``ze_device_memory_properties_t``."""

    TYPE = 0x7
    _fields_ = _struct(
        *((name, _U32) for name in ("flags", "clock", "width")),
        ("total", _U64),
        ("name", ctypes.c_char * 256),
    )


class AllocProperties(Struct):
    """``ze_memory_allocation_properties_t``."""

    TYPE = 0x17
    _fields_ = _struct(("type", _U32), ("id", _U64), ("page", _U64))


_DEVICE_FIELDS: list[tuple[str, Any]] = [
    *((name, _U32) for name in ("type", "vendor", "device", "flags", "subdevice", "clock")),
    ("max_alloc", _U64),
    *((name, _U32) for name in ("contexts", "priority", "threads", "width", "eus", "subslices")),
    ("slices", _U32),
    ("resolution", _U64),
    *((name, _U32) for name in ("bits", "kernel_bits")),
    ("uuid", ctypes.c_uint8 * 16),
    ("name", ctypes.c_char * 256),
]


class DeviceProperties(Struct):
    """``ze_device_properties_t``."""

    TYPE = 0x3
    _fields_ = _struct(*_DEVICE_FIELDS)


class SysmanDeviceProperties(Struct):
    """``zes_device_properties_t``."""

    TYPE = 0x1
    _fields_ = _struct(
        ("core", DeviceProperties), ("subdevices", _U32), ("texts", ctypes.c_char * (64 * 6))
    )


class Loader:
    """The loader of this process, initialised.

    Raises
    ------
    BackendUnavailableError
        If it cannot be loaded, or finds no driver.
    """

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL(LIBRARY)
            for name, arguments in _SIGNATURES.items():
                _declare(self.library, name, arguments)
        except (OSError, AttributeError) as error:
            raise BackendUnavailableError(
                f"the Level Zero loader cannot be loaded: {error}", hint=INSTALL_HINT
            ) from error
        for name, arguments in _NEWER.items():
            if self.has(name):
                _declare(self.library, name, arguments)
        code = self.code("zeInit", GPU_ONLY)
        if code:
            meaning = "no driver was found" if code == UNINITIALIZED else name_of(code)
            raise BackendUnavailableError(
                f"Level Zero cannot be initialised: {meaning}", hint=INSTALL_HINT
            )

    def has(self, name: str) -> bool:
        """Tell whether this loader knows a function."""
        return hasattr(self.library, name)

    def code(self, name: str, *arguments: Any) -> int:
        """Call a function and return what it answers."""
        return int(getattr(self.library, name)(*arguments))

    def call(self, name: str, *arguments: Any, what: str = "") -> None:
        """Call a function.

        Raises
        ------
        DeviceMemoryError, MechanismError
            If it answers anything but success.
        """
        code = self.code(name, *arguments)
        if code != SUCCESS:
            raise error_of(code, what or name)

    def handle(self, name: str, *arguments: Any) -> int:
        """Call a function whose last parameter is for a handle, and return that.

        Raises
        ------
        DeviceMemoryError, MechanismError
            If it answers anything but success.
        """
        found = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(found))
        return found.value or 0

    def handles(self, name: str, *arguments: Any) -> list[int]:
        """Call a function that lists handles: once for how many there are, once for them.

        Raises
        ------
        DeviceMemoryError, MechanismError
            If it answers anything but success.
        """
        count = ctypes.c_uint32()
        self.call(name, *arguments, ctypes.byref(count), None)
        found = (ctypes.c_void_p * count.value)()
        if count.value:
            self.call(name, *arguments, ctypes.byref(count), found)
        return [handle for handle in found[: count.value] if handle]


def _declare(library: ctypes.CDLL, name: str, arguments: tuple[Any, ...]) -> None:
    function = getattr(library, name)
    function.restype, function.argtypes = ctypes.c_uint32, arguments
