"""Content fingerprints of device memory: a kernel where it can be had, else torch, else none.

The kernels are compiled for the device once and kept on disk. They run on a lane of their own,
beside copies: those need the device's memory speed for a hundredth of what it has. Spans and sums
are carried by a kernel as well: a copy would wait behind all those of the transition.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sleepbackends.cumem.fingerprint_tables import Part, Tables
from sleepbackends.cumem.images import Images
from sleepbackends.cumem.nvrtc import KernelSource
from sleepbackends.cumem.torch_fingerprint import TorchFingerprints
from sleepbackends.errors import DeviceMemoryError, MechanismError, SleepBackendsError
from sleepbackends.vmm.driver import Event
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

_HEADER = "fingerprint.h"


def kernel_source() -> KernelSource:
    """Read what the kernel is compiled from."""
    here = Path(__file__).parent
    text = (here / "kernels" / "fingerprint.cu").read_bytes()
    header = (here.parent / "_native" / _HEADER).read_bytes()
    return KernelSource("fingerprint", text, ((_HEADER, header),))


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
        self._ways: dict[int, _Way | None] = {}
        self._lock = threading.RLock()

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
            way = self._way(device)
            return way is not None and way.prepare(span_count)

    def queue(self, device: int, spans: Sequence[Span]) -> Pending | None:
        """Queue the fingerprints of spans; see ``Driver.fingerprint``."""
        if not spans:
            return _Nothing()
        with self._lock:
            way = self._way(device)
            return None if way is None else way.queue(spans)

    def close(self) -> None:
        """Give everything back, once the lanes are done; a failure is logged."""
        with self._lock:
            ways, self._ways = self._ways, {}
            for way in ways.values():
                if way is not None:
                    way.close()

    def _way(self, device: int) -> _Way | None:
        if device not in self._ways:
            try:
                self._ways[device] = self._find(device)
            except DeviceMemoryError as error:
                # Another time there may be room.
                logger.debug("no fingerprints of device %d now: %s", device, error.message)
                return None
        return self._ways[device]

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
        If the kernel cannot be had; nothing is held but the lane.
    OSError
        If its source is missing.
    """

    def __init__(self, driver: CudaDriver, device: int, lock: threading.RLock) -> None:
        self._driver = driver
        self._device = device
        self._lock = lock
        self._tables = Tables(driver, device)
        images, architecture = Images(kernel_source()), driver.architecture(device)
        kept = images.cached(architecture)
        image = images.compiled(architecture) if kept is None else kept
        self._lane = driver.lane(device, "hash")
        try:
            self._module, self._function, self._carry = self._load(image)
        except MechanismError as error:
            if kept is None:
                raise
            logger.debug("the kernel that was kept cannot be loaded: %s", error.message)
            loaded = self._load(images.compiled(architecture))
            self._module, self._function, self._carry = loaded

    def _load(self, image: bytes) -> tuple[Any, Any, Any]:
        cu, call = self._driver._cu, self._driver.call
        with self._driver.current(self._device):
            module = call(cu.cuModuleLoadData, image)
            try:
                names = (b"fingerprint", b"carry")
                function, carry = (call(cu.cuModuleGetFunction, module, n) for n in names)
            except SleepBackendsError:
                self._unload(module)
                raise
        return module, function, carry

    def _unload(self, module: Any) -> None:
        try:
            with self._driver.current(self._device):
                self._driver.call(self._driver._cu.cuModuleUnload, module)
        except SleepBackendsError:
            logger.exception("the fingerprint kernel of device %d stays", self._device)

    def prepare(self, span_count: int) -> bool:
        """Have room for so many spans; tells whether there is."""
        try:
            part = self._tables.take(span_count)
        except SleepBackendsError as error:
            logger.debug("no room for fingerprints of device %d: %s", self._device, error.message)
            return False
        part.table.give_back(part)
        return True

    def queue(self, spans: Sequence[Span]) -> Pending | None:
        """Queue fingerprints; None if there is no room or the driver refuses."""
        try:
            part = self._tables.take(len(spans))
        except SleepBackendsError as error:
            logger.debug("no room for fingerprints of device %d: %s", self._device, error.message)
            return None
        part.write(spans)
        try:
            event = self._launch(part, spans)
        except SleepBackendsError as error:
            logger.info("no fingerprints of device %d now: %s", self._device, error.message)
            self._withdraw(part)
            return None
        part.table.keep(part, event)
        return _Queued(part, event, spans, self._lock)

    def _launch(self, part: Part, spans: Sequence[Span]) -> Event:
        lane, size_bytes = self._lane, part.size_bytes
        (device_spans, host_spans), (device_sums, host_sums) = part.spans, part.sums
        largest = max(span.size_bytes for span in spans)
        blocks = max(1, min(-(-largest // BLOCK_BYTES), _MOST_BLOCKS // len(spans)))
        self._queue_carry(host_spans, part.count, device_spans)
        lane.fill(device_sums, size_bytes, 0)
        arguments = [
            *((ctypes.c_void_p, device_spans), (ctypes.c_uint, len(spans))),
            *((ctypes.c_uint, blocks), (ctypes.c_void_p, device_sums)),
        ]
        lane.launch(self._function, len(spans) * blocks, THREADS, arguments)
        self._queue_carry(device_sums, part.count, host_sums)
        return lane.event()

    def _queue_carry(self, source: int, count: int, target: int) -> None:
        pointers = ((ctypes.c_void_p, source), (ctypes.c_uint, count), (ctypes.c_void_p, target))
        self._lane.launch(self._carry, -(-count // THREADS), THREADS, pointers)

    def _withdraw(self, part: Part) -> None:
        """Use rows again only once the device has surely left them alone."""
        try:
            self._lane.wait()
        except SleepBackendsError:
            part.table.keep(part, None)
        else:
            part.table.give_back(part)

    def close(self) -> None:
        """Give everything back, once the lane is done; a failure is logged."""
        try:
            self._lane.wait()
        except SleepBackendsError:
            logger.exception("waiting for fingerprints of device %d failed", self._device)
        self._tables.close()
        self._unload(self._module)


class _Queued:
    """Sums that the kernel is computing."""

    def __init__(
        self, part: Part, event: Event, spans: Sequence[Span], lock: threading.RLock
    ) -> None:
        self._part = part
        self._event: Event | None = event
        self._sizes = [span.size_bytes for span in spans]
        self._lock = lock
        self._found: list[int] | None = None

    def result(self) -> list[int]:
        """Wait for the fingerprints and return them; the same ones when asked again.

        Raises
        ------
        MechanismError
            If they could not be computed.
        ClosedError
            If the driver was closed before.
        """
        event = self._event
        if event is not None:
            event.wait()
        with self._lock:
            if self._found is None:
                sums = zip(self._part.read(), self._sizes, strict=True)
                self._found = [finish(s1, s2, size) for (s1, s2), size in sums]
                self._event = None
            return list(self._found)


class _Nothing:
    """The fingerprints of no spans."""

    def result(self) -> list[int]:
        """Return them."""
        return []
