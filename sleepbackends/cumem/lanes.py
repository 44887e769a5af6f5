"""Work of ours on a device: a stream in which one thing follows another, and its events."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sleepbackends.errors import ClosedError, RequestError, SleepBackendsError
from sleepbackends.vmm.driver import Direction, Event

if TYPE_CHECKING:
    from sleepbackends.cumem.driver import CudaDriver

logger = logging.getLogger(__name__)


class CudaLane:
    """One stream of one device, and nobody else's."""

    def __init__(self, driver: CudaDriver, device: int, stream: Any, doing: str) -> None:
        self._driver = driver
        self.device = device
        self._stream = stream
        self._doing = doing
        self._cu = driver._cu

    def _queue(self, function: Any, *args: Any) -> None:
        self._check_open()
        with self._driver.current(self.device):
            self._driver.call(function, *args, self._stream)

    def _check_open(self) -> None:
        # The driver crashes on a stream that was destroyed.
        if self._stream is None:
            raise ClosedError("the lane was closed with its backend", hint="create a new one")

    def to_host(self, host: int, address: int, size_bytes: int) -> None:
        """Queue a copy from the device into pinned host memory."""
        self._queue(self._cu.cuMemcpyDtoHAsync, host, address, size_bytes)

    def to_device(self, address: int, host: int, size_bytes: int) -> None:
        """Queue a copy from pinned host memory to the device."""
        self._queue(self._cu.cuMemcpyHtoDAsync, address, host, size_bytes)

    def copy_all(self, direction: Direction, copies: Iterable[tuple[int, int, int]]) -> None:
        """Queue copies of device address, host address and size; the context is entered once."""
        self._check_open()
        call, cu, stream = self._driver.call, self._cu, self._stream
        with self._driver.current(self.device):
            if direction == "down":
                for address, host, size_bytes in copies:
                    call(cu.cuMemcpyDtoHAsync, host, address, size_bytes, stream)
            else:
                for address, host, size_bytes in copies:
                    call(cu.cuMemcpyHtoDAsync, address, host, size_bytes, stream)

    def fill(self, address: int, size_bytes: int, byte: int) -> None:
        """Queue setting every byte."""
        self._queue(self._cu.cuMemsetD8Async, address, byte, size_bytes)

    def launch(
        self, function: Any, blocks: int, threads: int, arguments: Sequence[tuple[Any, Any]]
    ) -> None:
        """Queue a kernel: how many blocks of how many threads; the ctypes and values it takes."""
        types, values = zip(*arguments, strict=True)
        self._check_open()
        with self._driver.current(self.device):
            launch = self._cu.cuLaunchKernel
            shape = (blocks, 1, 1, threads, 1, 1)
            self._driver.call(launch, function, *shape, 0, self._stream, (values, types), 0)

    def event(self) -> CudaEvent:
        """Mark this point of the stream."""
        self._check_open()
        timing = self._cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
        with self._driver.current(self.device):
            event = self._driver.call(self._cu.cuEventCreate, timing)
            # Destroyed if the next call fails.
            marked = CudaEvent(self._driver, self.device, event, self._doing)
            self._driver.call(self._cu.cuEventRecord, event, self._stream)
        return marked

    def wait_for(self, event: Event) -> None:
        """Have whatever is queued from now on begin after an event."""
        if not isinstance(event, CudaEvent):
            raise RequestError("no event of this driver", hint="take one of its lanes' events")
        self._check_open()
        with self._driver.current(self.device):
            self._driver.call(self._cu.cuStreamWaitEvent, self._stream, event.handle, 0)

    def wait(self) -> None:
        """Wait for everything queued so far."""
        if self._stream is None:
            return  # closed while idle
        with self._driver.current(self.device):
            self._driver.call(self._cu.cuStreamSynchronize, self._stream, what=self._doing)

    def close(self) -> None:
        """Destroy the stream, which must be idle; a failure is logged."""
        stream, self._stream = self._stream, None
        try:
            with self._driver.current(self.device):
                self._driver.call(self._cu.cuStreamDestroy, stream)
        except SleepBackendsError:
            logger.exception("a stream of device %d stays", self.device)


class CudaEvent:
    """A point of a stream; destroyed with the object."""

    def __init__(self, driver: CudaDriver, device: int, event: Any, doing: str) -> None:
        self._driver = driver
        self._device = device
        self.handle = event
        self._doing = doing
        self._cu = driver._cu

    def done(self) -> bool:
        """Tell whether the work before it has finished."""
        with self._driver.current(self._device):
            (code,) = self._cu.cuEventQuery(self.handle)
        if code == self._cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._driver.call(lambda: (code,), what=self._doing)
        return True

    def wait(self) -> None:
        """Wait until the work before it has finished."""
        with self._driver.current(self._device):
            self._driver.call(self._cu.cuEventSynchronize, self.handle, what=self._doing)

    def __del__(self) -> None:
        try:
            with self._driver.current(self._device):
                self._driver.call(self._cu.cuEventDestroy, self.handle)
        except SleepBackendsError:
            logger.debug("an event of device %d stays", self._device, exc_info=True)
