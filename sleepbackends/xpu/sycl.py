"""The Level Zero handles behind torch's SYCL objects, without C++.

There are two ways to them, and both have to lead to the same handles. torch's C++ library says
which context and devices it uses; and a queue that torch gives away in Python knows its own. The
functions are exported by ``libc10_xpu.so`` and ``libsycl.so``, but are no public interface, so
they are looked up when they are needed. A C++ exception would end the process, so what could
raise is asked before.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

from sleepbackends.errors import BackendUnavailableError
from sleepbackends.xpu.accelerator import XPU

C10 = "libc10_xpu.so"
SYCL = ("libsycl.so.9", "libsycl.so.8")

_CONTEXT_OF_TORCH = "_ZN3c103xpu18get_device_contextEv"
_DEVICE_OF_TORCH = "_ZN3c103xpu14get_raw_deviceEa"
_WAIT = "_ZN3c103xpu19syncStreamsOnDeviceEa"
_NATIVE_CONTEXT = "_ZNK4sycl3_V17context9getNativeEv"
_NATIVE_DEVICE = "_ZNK4sycl3_V16device9getNativeEv"
_CONTEXT_OF_QUEUE = "_ZNK4sycl3_V15queue11get_contextEv"
_DEVICE_OF_QUEUE = "_ZNK4sycl3_V15queue10get_deviceEv"
_BACKEND_OF_QUEUE = "_ZNK4sycl3_V15queue11get_backendEv"

_LEVEL_ZERO = 2
_OBJECT_BYTES = 16
"""A context or a device of SYCL is a shared pointer."""

_HINT = "install torch 2.11 or newer for XPU, whose SYCL library is libsycl.so.8 or .9"


class TorchHandles:
    """Handles of torch's devices.

    Parameters
    ----------
    torch : module
        With XPU devices.

    Raises
    ------
    BackendUnavailableError
        If this torch or its SYCL library does not give them away.
    """

    def __init__(self, torch: Any) -> None:
        if platform.machine() != "x86_64":
            raise BackendUnavailableError(
                f"how SYCL's functions are called is not known on {platform.machine()}",
                hint="use a machine with an x86-64 processor",
            )
        self._xpu = XPU.of(torch)
        self._xpu.current_stream()  # torch makes its context and queues when first asked for one
        self._c10 = _loaded(C10)
        self._sycl = _loaded(*SYCL)
        # Objects that functions returned by value; those never go.
        self._objects: list[Any] = []

    @property
    def wait_pointer(self) -> int:
        """Address of what waits for all queues of torch on a device."""
        return ctypes.cast(_function(self._c10, _WAIT), ctypes.c_void_p).value or 0

    def of(self, device: int) -> tuple[int, int]:
        """Return the context and the device handle of a device.

        Raises
        ------
        BackendUnavailableError
            If the two ways to them differ, or the device is not one of Level Zero.
        """
        count = self._xpu.device_count()
        if not 0 <= device < count:
            raise BackendUnavailableError(f"torch has {count} XPU devices, not {device + 1}")
        queue = int(self._xpu.current_stream(device).sycl_queue)
        by_queue = self._of_queue(queue)
        by_torch = self._of_torch(device)
        if by_queue != by_torch:
            raise BackendUnavailableError(
                f"torch's context and its queue on {XPU.device_name(device)} do not belong "
                f"together: {_hex(by_torch)} and {_hex(by_queue)}",
                hint="report it with the versions of torch and of its SYCL library",
            )
        return by_torch

    def _of_torch(self, device: int) -> tuple[int, int]:
        context = _pointer(self._c10, _CONTEXT_OF_TORCH)()
        handle = _pointer(self._c10, _DEVICE_OF_TORCH, ctypes.c_int8)(device)
        return self._native(context, handle)

    def _of_queue(self, queue: int) -> tuple[int, int]:
        backend = _function(self._sycl, _BACKEND_OF_QUEUE)
        backend.restype, backend.argtypes = ctypes.c_int8, (ctypes.c_void_p,)
        if backend(queue) != _LEVEL_ZERO:
            raise BackendUnavailableError(
                "torch's queues are not those of Level Zero",
                hint="set ONEAPI_DEVICE_SELECTOR=level_zero:gpu before torch is imported",
            )
        return self._native(
            self._by_value(_CONTEXT_OF_QUEUE, queue), self._by_value(_DEVICE_OF_QUEUE, queue)
        )

    def _by_value(self, name: str, queue: int) -> int:
        # The caller of a function that returns such an object says where to put it.
        room = ctypes.create_string_buffer(_OBJECT_BYTES)
        self._objects.append(room)
        _pointer(self._sycl, name, ctypes.c_void_p, ctypes.c_void_p)(room, queue)
        return ctypes.addressof(room)

    def _native(self, context: int, device: int) -> tuple[int, int]:
        return (
            _pointer(self._sycl, _NATIVE_CONTEXT, ctypes.c_void_p)(context) or 0,
            _pointer(self._sycl, _NATIVE_DEVICE, ctypes.c_void_p)(device) or 0,
        )


def _loaded(*names: str) -> ctypes.CDLL:
    """Return a library that is loaded already: another copy of it would know nothing."""
    for name in names:
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
    raise BackendUnavailableError(f"torch has not loaded {' or '.join(names)}", hint=_HINT)


def _function(library: ctypes.CDLL, name: str) -> Any:
    try:
        return library[name]  # an object of its own, unlike an attribute
    except AttributeError as error:
        raise BackendUnavailableError(
            f"{library._name} has no function {name}", hint=_HINT
        ) from error


def _pointer(library: ctypes.CDLL, name: str, *arguments: Any) -> Any:
    function = _function(library, name)
    function.restype, function.argtypes = ctypes.c_void_p, arguments
    return function


def _hex(handles: tuple[int, int]) -> str:
    return "/".join(map(hex, handles))
