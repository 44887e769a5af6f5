"""Content fingerprints of device memory: a kernel where it can be had, else torch, else none.

The kernel is compiled for the device once and kept on disk.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sleepbackends.cumem.batches import CARRY, Batches, Found, carry_header
from sleepbackends.cumem.lanes import CudaLane
from sleepbackends.cumem.modules import Module
from sleepbackends.cumem.nvrtc import KernelSource
from sleepbackends.cumem.per_device import PerDevice
from sleepbackends.cumem.tables import Row
from sleepbackends.cumem.torch_fingerprint import TorchFingerprints
from sleepbackends.errors import DeviceMemoryError, SleepBackendsError
from sleepbackends.vmm.fingerprint import Pending, Span, finish

if TYPE_CHECKING:
    from sleepbackends.cumem.driver import CudaDriver

logger = logging.getLogger(__name__)

THREADS = 256
"""In a block; the kernel is written for this number."""

BLOCK_BYTES = 128 << 10
"""What a block reads of a span: short enough that the last blocks of a launch do not keep the
device waiting, long enough that their beginning and end do not count."""

_MOST_BLOCKS = 2**31 - 1

_NAME = "fingerprint"
_HEADER = "fingerprint.h"


def kernel_source() -> KernelSource:
    """Read what the kernel is compiled from."""
    here = Path(__file__).parent
    text = (here / "kernels" / "fingerprint.cu").read_bytes()
    header = (here.parent / "_native" / _HEADER).read_bytes()
    return KernelSource(_NAME, text, ((_HEADER, header), carry_header()))


class _Way(Protocol):
    """One way to compute fingerprints on one device."""

    def prepare(self, span_count: int) -> bool: ...

    def queue(self, spans: Sequence[Span]) -> Pending | None: ...

    def close(self) -> None: ...


class CudaFingerprints:
    """Computes fingerprints on every device, by the best way each has.

    Parameters
    ----------
    driver : CudaDriver
        Loads, launches and waits.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._lock = threading.RLock()
        self._ways = PerDevice[_Way]("fingerprints", self._find, self._lock)

    def prepare(self, device: int, span_count: int) -> bool:
        """Do beforehand what the first fingerprints would do: compile, load, allocate.

        Loading may wait for what is running on the device.

        Parameters
        ----------
        device : int
            Ordinal of the device.
        span_count : int
            How many spans may be outstanding at once; room grows when there are more.

        Returns
        -------
        bool
            Whether fingerprints can be had now.
        """
        with self._lock:
            way = self._ways.get(device)
            return way is not None and way.prepare(span_count)

    def queue(self, device: int, spans: Sequence[Span]) -> Pending | None:
        """Queue the fingerprints of spans; see ``Driver.fingerprint``."""
        if not spans:
            return Found[list[int]]([])
        with self._lock:
            way = self._ways.get(device)
            return None if way is None else way.queue(spans)

    def close(self) -> None:
        """Give everything back, once the lanes are done; a failure is logged."""
        self._ways.close()

    def _find(self, device: int) -> _Way | None:
        try:
            return _KernelFingerprints(self._driver, device, self._lock)
        except DeviceMemoryError:
            raise
        except (SleepBackendsError, OSError) as error:
            why = str(error)
        try:
            way = TorchFingerprints(device)
        except SleepBackendsError as error:
            logger.info("no fingerprints of device %d: %s; %s", device, why, error.message)
            return None
        logger.info("torch computes the fingerprints of device %d, slower: %s", device, why)
        return way


class _KernelFingerprints:
    """The kernel, loaded on one device.

    Parameters
    ----------
    driver : CudaDriver
        Loads, launches and waits.
    device : int
        Ordinal of the device.
    lock : RLock
        Held by whoever calls; ``result`` takes it.

    Raises
    ------
    SleepBackendsError
        If the kernel cannot be had; nothing is held.
    OSError
        If its source is missing.
    """

    def __init__(self, driver: CudaDriver, device: int, lock: threading.RLock) -> None:
        self._device = device
        self._module = Module(driver, device, kernel_source(), (_NAME, CARRY))
        self._batches = Batches(driver, device, self._module[CARRY], lock)

    def prepare(self, span_count: int) -> bool:
        """Have room for so many spans; tells whether there is."""
        try:
            self._batches.prepare(span_count)
        except SleepBackendsError as error:
            logger.debug("no room for fingerprints of device %d: %s", self._device, error.message)
            return False
        return True

    def queue(self, spans: Sequence[Span]) -> Pending | None:
        """Queue fingerprints; None if there is no room or the driver refuses."""
        sizes = [span.size_bytes for span in spans]
        blocks = max(1, min(-(-max(sizes) // BLOCK_BYTES), _MOST_BLOCKS // len(spans)))

        def launch(lane: CudaLane, given: int, found: int) -> None:
            arguments = [
                *((ctypes.c_void_p, given), (ctypes.c_uint, len(spans))),
                *((ctypes.c_uint, blocks), (ctypes.c_void_p, found)),
            ]
            lane.launch(self._module[_NAME], len(spans) * blocks, THREADS, arguments)

        def convert(sums: list[Row]) -> list[int]:
            return [finish(s1, s2, size) for (s1, s2), size in zip(sums, sizes, strict=True)]

        try:
            return self._batches.queue(spans, launch, convert)
        except DeviceMemoryError as error:
            logger.debug("no room for fingerprints of device %d: %s", self._device, error.message)
        except SleepBackendsError as error:
            logger.info("no fingerprints of device %d now: %s", self._device, error.message)
        return None

    def close(self) -> None:
        """Give everything back, once the lane is done; a failure is logged."""
        self._batches.close()
        self._module.unload()
