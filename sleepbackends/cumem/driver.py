"""The CUDA driver: a thin typed layer over ``cuda.bindings.driver``.

Nothing else calls it, but that lanes, fingerprints and packing reach what they alone need
through ``call``. Every call is made with the device's primary context current in the calling
thread, and lets other Python threads run; bindings older than 12.9.1 (and 13.0.0, 13.0.1) hold
the GIL in driver calls and are refused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from sleepbackends.cuda_bindings import bindings_problem
from sleepbackends.cumem import fingerprint, packing
from sleepbackends.cumem.captures import Aside
from sleepbackends.cumem.compiler import Compiler
from sleepbackends.cumem.current import Current
from sleepbackends.cumem.errors import error_of
from sleepbackends.cumem.fingerprint import CudaFingerprints
from sleepbackends.cumem.lanes import CudaLane
from sleepbackends.cumem.packing import CudaPackings
from sleepbackends.cumem.slots import allocation_prop
from sleepbackends.errors import (
    BackendUnavailableError,
    DeviceMemoryError,
    HostMemoryError,
    MechanismError,
    SleepBackendsError,
)
from sleepbackends.vmm.driver import DOING, KernelUse, LaneUse
from sleepbackends.vmm.driver_errors import native_error
from sleepbackends.vmm.fingerprint import Pending, Span
from sleepbackends.vmm.packing.protocol import Packing

logger = logging.getLogger(__name__)

LIBRARY = "libcuda.so.1"


class CudaDriver:
    """The driver of this process.

    Raises
    ------
    BackendUnavailableError
        If the bindings or the driver cannot be used.
    """

    def __init__(self) -> None:
        problem = bindings_problem()
        if problem is not None:
            raise BackendUnavailableError(problem.reason, hint=problem.hint)
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise BackendUnavailableError(
                f"cuda-bindings cannot be imported: {error}",
                hint="reinstall it: pip install --force-reinstall 'sleepbackends[cuda]'",
            ) from error
        self._cu: Any = driver
        self._contexts: dict[int, Any] = {}
        self._lanes: dict[tuple[int, LaneUse], CudaLane] = {}
        self.compiler = Compiler()
        self.fingerprints = CudaFingerprints(self)
        self._packings = CudaPackings(self)
        self._lock = threading.Lock()
        try:
            self.call(driver.cuInit, 0)
        except (SleepBackendsError, RuntimeError) as error:
            raise BackendUnavailableError(
                f"the CUDA driver cannot be used: {error}",
                hint="sleepbackends doctor says what this machine has",
            ) from error

    def call(self, function: Any, *args: Any, what: str = "", needed_bytes: int = 0) -> Any:
        """Call the driver and return its result.

        Raises
        ------
        DeviceMemoryError, MechanismError
            If it answers anything but success.
        """
        code, *results = function(*args)
        if code:
            raise error_of(code.name, what or function.__name__, needed_bytes=needed_bytes)
        return results[0] if len(results) == 1 else tuple(results)

    @property
    def device_count(self) -> int:
        """How many devices this process sees."""
        return int(self.call(self._cu.cuDeviceGetCount))

    def supports_virtual_memory(self, device: int) -> bool:
        """Tell whether a device has virtual memory management."""
        attribute = self._cu.CUdevice_attribute
        flag = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        return bool(self.call(self._cu.cuDeviceGetAttribute, flag, self._device(device)))

    def pci_address(self, device: int) -> str:
        """Return where a device is attached, as ``0000:3B:00.0``."""
        room = 32
        text: bytes = self.call(self._cu.cuDeviceGetPCIBusId, room, self._device(device))
        return text.partition(b"\0")[0].decode()

    def architecture(self, device: int) -> int:
        """Return the compute capability of a device, as 90 for 9.0."""
        attribute, number = self._cu.CUdevice_attribute, self._device(device)
        major, minor = (
            self.call(self._cu.cuDeviceGetAttribute, flag, number)
            for flag in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        return 10 * int(major) + int(minor)

    def _device(self, device: int) -> Any:
        return self.call(self._cu.cuDeviceGet, device)

    def _context(self, device: int) -> Any:
        context = self._contexts.get(device)
        if context is not None:
            return context
        with self._lock:
            if device not in self._contexts:
                self._contexts[device] = self.call(
                    self._cu.cuDevicePrimaryCtxRetain, self._device(device)
                )
            return self._contexts[device]

    def current(self, device: int) -> AbstractContextManager[None]:
        """Make the device's primary context current in this thread, and put back what was."""
        return Current(self, self._context(device))

    def aside(self) -> AbstractContextManager[None]:
        """Let what this thread calls disturb no graph that another thread is capturing."""
        return Aside(self)

    def lane(self, device: int, use: LaneUse) -> CudaLane:
        """Return the stream of a device for one kind of our work; always the same."""
        with self.current(device), self._lock:
            if (device, use) not in self._lanes:
                flags = self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING
                # Of the lowest priority, which is the default: an engine's may be higher.
                stream = self.call(self._cu.cuStreamCreate, flags)
                self._lanes[device, use] = CudaLane(self, device, stream, DOING[use])
            return self._lanes[device, use]

    def fingerprint(self, device: int, spans: Sequence[Span]) -> Pending | None:
        """Queue the fingerprints of memory on a stream of their own; None if that cannot be."""
        return self.fingerprints.queue(device, spans)

    def packing(self, device: int) -> Packing | None:
        """Return what packs the memory of a device; None if that cannot be."""
        return self._packings.get(device)

    def compile(self, device: int, use: KernelUse) -> None:
        """Have the kernels of a device compiled, where they can be; nothing is loaded."""
        source = packing.kernel_source if use == "packing" else fingerprint.kernel_source
        try:
            self.compiler.image(source(), self.architecture(device))
        except (SleepBackendsError, OSError) as error:
            logger.debug("the kernels for %s are not compiled: %s", use, error)

    def load(self, device: int, use: KernelUse) -> None:
        """Have the kernels of a device there, where they can be had."""
        if use == "packing":
            self.packing(device)
        else:
            self.fingerprint(device, [Span(0, 0)])

    def synchronize(self, device: int) -> None:
        """Wait for everything that anybody queued on the device."""
        with self.current(device):
            self.call(self._cu.cuCtxSynchronize)

    def memory_info(self, device: int) -> tuple[int, int]:
        """Return free and total bytes of the device."""
        with self.current(device):
            free, total = self.call(self._cu.cuMemGetInfo)
        return int(free), int(total)

    def free_bytes(self, device: int) -> int:
        """Return how much memory the device has left; other processes move it."""
        return self.memory_info(device)[0]

    def read(self, address: int, size_bytes: int, device: int) -> bytes:
        """Copy device memory to the host, now."""
        data = bytearray(size_bytes)
        with self.current(device):
            self.call(self._cu.cuCtxSynchronize)
            self.call(self._cu.cuMemcpyDtoH, data, address, size_bytes)
        return bytes(data)

    def write(self, address: int, data: bytes, device: int) -> None:
        """Copy host bytes to device memory, now."""
        with self.current(device):
            self.call(self._cu.cuMemcpyHtoD, address, data, len(data))
            self.call(self._cu.cuCtxSynchronize)

    def reclaim(self, device: int) -> None:
        """Take one granule of memory and give it back, which ends releases that are under way."""
        cu = self._cu
        wanted = allocation_prop(cu, device)
        least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        with self.current(device):
            size_bytes = self.call(cu.cuMemGetAllocationGranularity, wanted, least)
            handle = self.call(cu.cuMemCreate, size_bytes, wanted, 0, needed_bytes=size_bytes)
            self.call(cu.cuMemRelease, handle)

    def pin(self, host: int, size_bytes: int) -> None:
        """Register host memory for every device.

        Raises
        ------
        HostMemoryError
            If the driver refuses.
        """
        portable = self._cu.CU_MEMHOSTREGISTER_PORTABLE
        try:
            with self.current(self._device_in_use()):
                self.call(self._cu.cuMemHostRegister, host, size_bytes, portable)
        except (MechanismError, DeviceMemoryError) as error:
            raise HostMemoryError(
                f"the driver refuses to pin {size_bytes} bytes of host memory: {error.message}",
                needed_bytes=size_bytes,
                hint="raise the memory limit of the container, or ulimit -l",
            ) from error

    def _device_in_use(self) -> int:
        # A context costs hundreds of megabytes on a device that this process may not use.
        with self._lock:
            return next(iter(self._contexts), 0)

    def unpin(self, host: int) -> None:
        """Undo ``pin``.

        Raises
        ------
        MechanismError
            If the driver refuses; the memory is still registered.
        """
        with self.current(self._device_in_use()):
            self.call(self._cu.cuMemHostUnregister, host)

    def check(self, code: int, what: str, *, needed_bytes: int = 0, device: int = 0) -> None:
        """Raise the error that a code of the native library stands for."""
        if code < 0:
            raise native_error(code, what)
        if code:
            name = self._name(code)
            no_room = code == int(self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
            available = self.free_bytes(device) if no_room else None
            raise error_of(name, what, needed_bytes=needed_bytes, available_bytes=available)

    def _name(self, code: int) -> str:
        try:
            return str(self._cu.CUresult(code).name)
        except ValueError:  # of a driver newer than the bindings
            return f"CUDA error {code}"

    def close(self) -> None:
        """End the lanes, which must be idle. Reading, writing and waiting still work."""
        self.fingerprints.close()
        self._packings.close()
        with self._lock:
            lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()
