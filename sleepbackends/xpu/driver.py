"""Level Zero as a driver of ``vmm``: lanes, host memory, waiting, and what a device has.

Extents are created, mapped and unmapped by the native library, which is told here which
handles belong to a device.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sleepbackends.errors import (
    BackendUnavailableError,
    HostMemoryError,
    MechanismError,
    SleepBackendsError,
)
from sleepbackends.vmm.address_space import library_path
from sleepbackends.vmm.driver import DOING, KernelUse, LaneUse
from sleepbackends.vmm.driver_errors import native_error
from sleepbackends.vmm.fingerprint import Pending, Span
from sleepbackends.xpu.accelerator import XPU
from sleepbackends.xpu.devices import Device, NativeDevice, find_devices
from sleepbackends.xpu.errors import OUT_OF_DEVICE_MEMORY, error_of
from sleepbackends.xpu.lanes import Events, XpuLane
from sleepbackends.xpu.loader import (
    ASYNCHRONOUS,
    INSTALL_HINT,
    LIBRARY,
    SYNCHRONOUS,
    AllocProperties,
    Loader,
    QueueDesc,
    QueueGroup,
)
from sleepbackends.xpu.pinning import Pinning
from sleepbackends.xpu.sysman import memory_modules
from sleepbackends.xpu.torch_fingerprint import XpuFingerprints

_COMPUTE, _COPY = 1, 2

DEVICE_POINTER = 2
"""What Level Zero says of the type of an address in device memory."""


class XpuDriver:
    """The driver of this process.

    Parameters
    ----------
    torch : module, optional
        torch with XPU devices, whose context is used; without it one of ours.

    Raises
    ------
    BackendUnavailableError
        If the loader, a driver, the native library or torch's handles cannot be used.
    """

    _telling = threading.Lock()

    def __init__(self, torch: Any = None) -> None:
        self.ze = Loader()
        self._torch = torch
        self._native = _open_native()
        with self._telling:
            try:
                self._devices = find_devices(self.ze, self._native, torch)
                for number, device in enumerate(self._devices):
                    self._tell(number, device)
            except MechanismError as error:
                raise BackendUnavailableError(
                    f"the Level Zero driver cannot be used: {error.message}", hint=error.hint
                ) from error
        self._pinning = Pinning(self.ze, {device.driver for device in self._devices})
        self._events = [Events(self.ze, device) for device in self._devices]
        self._lanes: dict[tuple[int, LaneUse], XpuLane] = {}
        self._fingerprints: dict[int, XpuFingerprints] = {}
        self._lock = threading.Lock()

    def _tell(self, number: int, device: Device) -> None:
        modules = memory_modules(self.ze, device)
        told = NativeDevice(device.context, device.handle, device.wait_pointer, device.total_bytes)
        told.modules[: len(modules)] = modules
        told.n_modules = len(modules)
        code = self._native.sb_use_device(number, ctypes.byref(told))
        if code:
            raise BackendUnavailableError(
                f"memory of {device.name} was made with other handles than torch's: code {code}",
                hint="import torch before the first backend is created",
            )

    @property
    def device_count(self) -> int:
        """How many devices this process sees."""
        return len(self._devices)

    def pci_address(self, device: int) -> None:
        """Return None: Level Zero is not asked for it."""

    def device(self, device: int) -> Device:
        """Return what is known of a device."""
        return self._devices[device]

    def aside(self) -> AbstractContextManager[None]:
        """Do nothing: here a capture concerns nobody but who queues on what is captured."""
        return nullcontext()

    def lane(self, device: int, use: LaneUse) -> XpuLane:
        """Return the lane of a device for one kind of our work; always the same."""
        with self._lock:
            if (device, use) not in self._lanes:
                command_list = self._command_list(device, use, ASYNCHRONOUS)
                events = self._events[device]
                self._lanes[device, use] = XpuLane(self, events, command_list, DOING[use])
            return self._lanes[device, use]

    def _command_list(self, device: int, use: LaneUse, mode: int) -> int:
        of = self._devices[device]
        desc = QueueDesc(ordinal=self._group(device, use), mode=mode)
        return self.ze.handle(
            "zeCommandListCreateImmediate", of.context, of.handle, ctypes.byref(desc)
        )

    def _group(self, device: int, use: LaneUse) -> int:
        """Choose the engines: for copies the first that do nothing else, where there are any."""
        handle, count = self._devices[device].handle, ctypes.c_uint32()
        name = "zeDeviceGetCommandQueueGroupProperties"
        self.ze.call(name, handle, ctypes.byref(count), None)
        groups = (QueueGroup * count.value)()
        for group in groups:
            group.stype = QueueGroup.TYPE
        self.ze.call(name, handle, ctypes.byref(count), groups)
        can = [group.flags & (_COMPUTE | _COPY) for group in groups]
        copies = use in ("copy", "stage")
        wanted = [_COPY, _COMPUTE | _COPY] if copies else [_COMPUTE | _COPY, _COMPUTE]
        return next((can.index(flags) for flags in wanted if flags in can), 0)

    @property
    def computes_fingerprints(self) -> bool:
        """Whether unchanged memory can be told from changed memory."""
        return self._torch is not None

    def fingerprint(self, device: int, spans: Sequence[Span]) -> Pending | None:
        """Queue the fingerprints of memory through torch; None without it."""
        if self._torch is None:
            return None
        with self._lock:
            if device not in self._fingerprints:
                self._fingerprints[device] = XpuFingerprints(device)
            return self._fingerprints[device].queue(spans)

    def packing(self, device: int) -> None:
        """Return nothing: there are no kernels for it."""

    def compile(self, device: int, use: KernelUse) -> None:
        """Do nothing: there are no kernels of ours."""

    def load(self, device: int, use: KernelUse) -> None:
        """Do nothing: torch loads its own."""

    def synchronize(self, device: int) -> None:
        """Wait for everything that torch and we queued on the device.

        Level Zero has no call that waits for everybody: who else launches kernels waits for
        them before calling us.
        """
        if self._torch is not None:
            try:
                XPU.of(self._torch).synchronize(device)
            except RuntimeError as error:
                raise MechanismError(
                    f"waiting for {XPU.device_name(device)} failed: {error}",
                    hint="the device may be lost; restart the process",
                    recoverable=False,
                ) from error
        with self._lock:
            lanes = [lane for (number, _), lane in self._lanes.items() if number == device]
        for lane in lanes:
            lane.wait()

    def free_bytes(self, device: int) -> int:
        """Return how much memory the device has left: the least that it and our books say."""
        found = ctypes.c_size_t()
        self.check(self._native.sb_free_bytes(device, ctypes.byref(found)), "asking for memory")
        return found.value

    def reclaim(self, device: int) -> None:
        """Do nothing: that a release goes on in the background is not known of this driver."""

    def committed_bytes(self, device: int) -> int:
        """Return how much physical memory our own books say that we hold."""
        return int(self._native.sb_committed_bytes(device))

    def is_device_pointer(self, device: int, address: int) -> bool:
        """Tell whether Level Zero takes an address for one of device memory."""
        found = AllocProperties()
        context = self._devices[device].context
        self.ze.call(
            *("zeMemGetAllocProperties", context, address, ctypes.byref(found)),
            ctypes.byref(ctypes.c_void_p()),
        )
        return bool(found.type == DEVICE_POINTER)

    def read(self, address: int, size_bytes: int, device: int) -> bytes:
        """Copy device memory to the host, now."""
        data = ctypes.create_string_buffer(max(size_bytes, 1))
        self.synchronize(device)
        self._copy_now(device, ctypes.addressof(data), address, size_bytes)
        return data.raw[:size_bytes]

    def write(self, address: int, data: bytes, device: int) -> None:
        """Copy host bytes to device memory, now."""
        source = ctypes.create_string_buffer(data, max(len(data), 1))
        self._copy_now(device, address, ctypes.addressof(source), len(data))

    def _copy_now(self, device: int, target: int, source: int, size_bytes: int) -> None:
        if not size_bytes:
            return
        command_list = self._command_list(device, "copy", SYNCHRONOUS)
        try:
            self.ze.call(
                *("zeCommandListAppendMemoryCopy", command_list, target, source, size_bytes),
                *(None, 0, None),
            )
        finally:
            self.ze.code("zeCommandListDestroy", command_list)

    def pin(self, host: int, size_bytes: int) -> None:
        """Import host memory into the driver, so that the device reaches it at full speed.

        Raises
        ------
        HostMemoryError
            If the driver refuses, or cannot.
        """
        try:
            self._pinning.pin(host, size_bytes)
        except SleepBackendsError as error:
            raise HostMemoryError(
                f"the driver refuses to import {size_bytes} bytes of host memory: {error.message}",
                needed_bytes=size_bytes,
                hint="raise the memory limit of the container, or update the Intel GPU driver",
            ) from error

    def unpin(self, host: int) -> None:
        """Undo ``pin``.

        Raises
        ------
        MechanismError
            If the driver refuses; the memory is still imported.
        """
        self._pinning.unpin(host)

    def is_pinned(self, host: int, size_bytes: int) -> bool:
        """Tell whether all of some host memory was imported."""
        return self._pinning.covers(host, size_bytes)

    def check(self, code: int, what: str, *, needed_bytes: int = 0, device: int = 0) -> None:
        """Raise the error that a code of the native library stands for."""
        if code < 0:
            raise native_error(code, what)
        if code:
            no_room = code == OUT_OF_DEVICE_MEMORY
            available = self.free_bytes(device) if no_room else None
            raise error_of(code, what, needed_bytes=needed_bytes, available_bytes=available)

    def close(self) -> None:
        """End the lanes, which must be idle. Reading, writing and waiting still work."""
        with self._lock:
            lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()
        for events in self._events:
            events.close()


def _open_native() -> Any:
    native = ctypes.CDLL(str(library_path("level_zero")))
    native.sb_committed_bytes.restype = ctypes.c_size_t
    code = native.sb_init(LIBRARY.encode())
    if code:
        why = native_error(code, f"using {LIBRARY}").message if code < 0 else f"code {code:#x}"
        raise BackendUnavailableError(why, hint=INSTALL_HINT)
    return native
