"""A torch with XPU devices, as far as the backend uses it, over the simulated driver.

The allocator's callbacks and the libraries that handles are taken from are real calls into real
libraries; kernels are writes that the simulated driver makes when somebody waits for them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from sleepbackends.xpu.loader import ContextDesc, Loader
from tests.simulators.level_zero import Simulator, build_stand_in
from tests.simulators.pool_torch import PoolTorch
from tests.xpu.fixtures import DEVICES

_WAIT = ctypes.CFUNCTYPE(None, ctypes.c_int)


class Queue(ctypes.Structure):
    """A queue of the stand-in for SYCL; see ``torch_stand_in/libsycl.c``."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("device", ctypes.c_void_p),
        ("backend", ctypes.c_size_t),
    )


class Stream:
    """A stream on which everything is done at once."""

    def __init__(self, queue: Queue | None = None) -> None:
        self.sycl_queue = 0 if queue is None else ctypes.addressof(queue)

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None: ...


class XpuTorch(PoolTorch):
    """Stands for the module ``torch`` with XPU devices.

    Parameters
    ----------
    simulator
        The driver.
    """

    __version__ = "2.11.0+xpu"
    xpu: Any
    device = torch.device

    def __init__(self, simulator: Simulator) -> None:
        super().__init__("xpu")
        self._simulator = simulator
        ze = Loader()
        driver = ze.handles("zeDriverGet")[0]
        self.context = ze.handle("zeContextCreate", driver, ctypes.byref(ContextDesc()))
        self.handles = ze.handles("zeDeviceGet", driver)
        self.queues = [Queue(self.context, handle, 2) for handle in self.handles]
        self.synchronized: list[int] = []
        self.xpu.device_count = lambda: DEVICES
        self.xpu.current_stream = lambda device=0: Stream(self.queues[device])
        self.xpu.Stream = lambda device: Stream()
        self.xpu.synchronize = self._synchronize
        self._C._construct_storage_from_data_pointer = self._storage
        self._libraries = [
            ctypes.CDLL(str(build_stand_in(name))) for name in ("libc10_xpu.so", "libsycl.so.9")
        ]
        wait = ctypes.cast(simulator.engine_wait_pointer, _WAIT)
        for number, handle in enumerate(self.handles):
            self.tell_torch(number, self.context, handle, wait)

    def tell_torch(self, device: int, context: int, handle: int, wait: Any) -> None:
        """Set the handles that torch's own library gives away."""
        set_handles = self._libraries[0].stand_in_set
        set_handles.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, _WAIT)
        set_handles(context, device, handle, wait)

    def _synchronize(self, device: int) -> None:
        self.synchronized.append(device)
        self._simulator.engine_wait(device)

    def empty(self, size: int, **options: Any) -> Any:
        """Allocate bytes, or return a tensor that can be put over a storage."""
        return super().empty(size) if size else torch.empty(0, dtype=torch.uint8)

    def _storage(self, address: int, device: torch.device, size_bytes: int) -> Any:
        assert device.type == "xpu"
        data = self._simulator.read(address, size_bytes)
        assert data is not None, "memory that is not mapped was read"
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()
