"""Packing of device memory by kernels, which are compiled for the device once and kept on disk."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sleepbackends.cumem.batches import CARRY, Batches, Found, carry_header
from sleepbackends.cumem.lanes import CudaLane
from sleepbackends.cumem.modules import Module
from sleepbackends.cumem.nvrtc import KernelSource
from sleepbackends.cumem.per_device import PerDevice
from sleepbackends.cumem.slots import DeviceSlots
from sleepbackends.cumem.tables import Row
from sleepbackends.errors import DeviceMemoryError, RequestError, SleepBackendsError
from sleepbackends.vmm.address_space import library_path
from sleepbackends.vmm.driver import Lane
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.packing.layout import (
    HEADER_BYTES,
    MOST_BYTES,
    TILE_ELEMENTS,
    Choice,
    Layout,
)
from sleepbackends.vmm.packing.protocol import Pending

if TYPE_CHECKING:
    from sleepbackends.cumem.driver import CudaDriver

logger = logging.getLogger(__name__)

THREADS = 512
"""In a block; the kernels are written for this number."""

BLOCK_BYTES = 256 << 10
"""What a block counts of a span."""

ALIGNMENT_BYTES = 16
"""Where spans and packed bytes begin: kernels read and write so much at once."""

_MOST_BLOCKS = 2**31 - 1
_SIZE_BITS = 40
_NAME = "packing"
_HEADER = "packing.h"
_KERNELS = ("survey", "count", "tally", "prefix", "pack", "unpack")

_POINTER, _SIZE, _WORD = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint


def kernel_source() -> KernelSource:
    """Read what the kernels are compiled from."""
    here = Path(__file__).parent
    text = (here / "kernels" / f"{_NAME}.cu").read_bytes()
    header = (here.parent / "_native" / _HEADER).read_bytes()
    return KernelSource(_NAME, text, ((_HEADER, header), carry_header()))


class CudaPackings:
    """Finds what packs the memory of each device.

    Parameters
    ----------
    driver : CudaDriver
        Loads, launches and waits.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._packings = PerDevice("packing", self._find, threading.RLock())

    def get(self, device: int) -> CudaPacking | None:
        """Return what packs the memory of a device; see ``Driver.packing``."""
        return self._packings.get(device)

    def close(self) -> None:
        """Give everything back, once the lanes are done; a failure is logged."""
        self._packings.close()

    def _find(self, device: int) -> CudaPacking | None:
        try:
            return CudaPacking(self._driver, device)
        except DeviceMemoryError:
            raise
        except (SleepBackendsError, OSError) as error:
            logger.info("no packing on device %d: %s", device, error)
            return None


class CudaPacking:
    """Packs the memory of one device; see ``Packing``.

    Parameters
    ----------
    driver : CudaDriver
        Loads, launches and waits.
    device : int
        Ordinal of the device.

    Raises
    ------
    SleepBackendsError
        If the kernels cannot be had, or the host cannot unpack; nothing is held.
    OSError
        If the source of the kernels is missing.
    """

    def __init__(self, driver: CudaDriver, device: int) -> None:
        library_path("host")  # what is packed has to be readable without a device
        self._driver = driver
        self._device = device
        self._lock = threading.RLock()
        self._module = Module(driver, device, kernel_source(), (*_KERNELS, CARRY))
        self._batches = Batches(driver, device, self._module[CARRY], self._lock)

    def survey(self, spans: Sequence[Span]) -> Pending[list[Choice | None]]:
        """Queue looking at a sample of each span."""
        if not spans:
            return Found[list[Choice | None]]([])
        rows = [span if _can_be_packed(span) else Span(0, 0) for span in spans]

        def launch(lane: CudaLane, given: int, found: int) -> None:
            arguments = ((_POINTER, given), (_WORD, len(rows)), (_POINTER, found))
            lane.launch(self._module["survey"], len(rows), THREADS, arguments)

        def convert(choices: list[Row]) -> list[Choice | None]:
            layouts = {code: Layout.of(code) for code in {code for code, _ in choices} if code}
            return [Choice(layouts[code], n) if code else None for code, n in choices]

        with self._lock:
            return self._batches.queue(rows, launch, convert)

    def count(self, spans: Sequence[Span], layouts: Sequence[Layout]) -> Pending[list[int]]:
        """Queue counting the escapes of spans, each in its layout."""
        if not spans:
            return Found[list[int]]([])
        for span in spans:
            _check_span(span)
        rows = [
            # The layout's version is known to the kernel.
            (span.address, span.size_bytes | layout.code >> 8 << _SIZE_BITS)
            for span, layout in zip(spans, layouts, strict=True)
        ]
        largest = max(span.size_bytes for span in spans)
        blocks = max(1, min(-(-largest // BLOCK_BYTES), _MOST_BLOCKS // len(rows)))

        def launch(lane: CudaLane, given: int, found: int) -> None:
            arguments = [
                *((_POINTER, given), (_WORD, len(rows))),
                *((_WORD, blocks), (_POINTER, found)),
            ]
            lane.launch(self._module["count"], len(rows) * blocks, THREADS, arguments)

        def convert(counts: list[Row]) -> list[int]:
            return [escapes for escapes, _ in counts]

        with self._lock:
            return self._batches.queue(rows, launch, convert)

    def pack(
        self, lane: Lane, span: Span, layout: Layout, target: int, capacity_bytes: int
    ) -> None:
        """Queue packing a span into device memory."""
        own = self._own(lane)
        _check_span(span)
        _check_span(Span(target, span.size_bytes))
        if capacity_bytes < layout.packed_bytes(span.size_bytes, 0):
            raise RequestError(
                f"{span.size_bytes} bytes cannot be packed into {capacity_bytes}",
                hint=f"have room for {layout.packed_bytes(span.size_bytes, 0)} and each escape",
            )
        data = ((_POINTER, span.address), (_SIZE, span.size_bytes), (_WORD, layout.code))
        packed, capacity = (_POINTER, target), (_SIZE, capacity_bytes)
        tiles = -(-(span.size_bytes // layout.element_bytes) // TILE_ELEMENTS)
        if tiles:
            own.launch(self._module["tally"], tiles, THREADS, (*data, packed))
        own.launch(self._module["prefix"], 1, THREADS, (*data, packed, capacity))
        if tiles:
            own.launch(self._module["pack"], tiles, THREADS, (*data, packed, capacity))

    def unpack(self, lane: Lane, source: Span, span: Span) -> None:
        """Queue unpacking into device memory."""
        own = self._own(lane)
        _check_span(span)
        _check_span(Span(source.address, span.size_bytes))
        if source.size_bytes < HEADER_BYTES:
            raise RequestError(
                f"{source.size_bytes} bytes are no packed ones", hint="pass all that were packed"
            )
        arguments = (
            *((_POINTER, source.address), (_SIZE, source.size_bytes)),
            *((_POINTER, span.address), (_SIZE, span.size_bytes)),
        )
        # As many as there are of the smaller elements: only the packed bytes say which they are.
        tiles = max(1, -(-span.size_bytes // (2 * TILE_ELEMENTS)))
        own.launch(self._module["unpack"], tiles, THREADS, arguments)

    def slots(self, count: int, size_bytes: int) -> DeviceSlots:
        """Take device memory for so many packed spans, of so many bytes each."""
        return DeviceSlots(self._driver, self._device, count, size_bytes)

    def _own(self, lane: Lane) -> CudaLane:
        if isinstance(lane, CudaLane) and lane.device == self._device:
            return lane
        raise RequestError(
            f"it is no lane of device {self._device}", hint="take one of the same driver and device"
        )

    def close(self) -> None:
        """Give everything back, once the lanes are done; a failure is logged."""
        with self._lock:
            self._batches.close()
            self._module.unload()


def _can_be_packed(span: Span) -> bool:
    return span.address % ALIGNMENT_BYTES == 0 and span.size_bytes <= MOST_BYTES


def _check_span(span: Span) -> None:
    if not _can_be_packed(span):
        raise RequestError(
            f"{span.size_bytes} bytes at {span.address:#x} cannot be packed there or from there",
            hint=f"begin at a multiple of {ALIGNMENT_BYTES}, and with at most {MOST_BYTES}",
        )
