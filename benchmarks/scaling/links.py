"""What a sleep is made of, plainly: touching and registering host memory, copying, mapping.

Each step is timed on one rank alone and on all at once, with the clock that all processes of
a machine have in common, so that it can be told which of them many ranks wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from benchmarks.scaling.spec import GIB, Spec
from sleepbackends.cumem.slots import DeviceSlots
from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm import arena
from sleepbackends.vmm.near import Near
from sleepbackends.vmm.touch import touch

Span = tuple[float, float]
"""When something began and ended, in seconds of the machine's monotonic clock."""

DEVICE_STEPS = ("touch", "register", "copy_down", "copy_up", "map", "unmap")
HOST_STEPS = ("touch", "copy_down", "copy_up")

MAPPED_BYTES = 256 << 20
"""How much device memory is mapped by one call."""


class Link(Protocol):
    """The way between one rank's memory and the host."""

    def touch(self) -> None:
        """Have host memory, touched for the first time."""
        ...

    def register(self) -> None:
        """Have the driver pin it."""
        ...

    def copy_down(self) -> None:
        """Copy from the rank to the host."""
        ...

    def copy_up(self) -> None:
        """Copy from the host to the rank."""
        ...

    def map(self) -> None:
        """Have as much memory of the device again, mapped as a resume does it."""
        ...

    def unmap(self) -> None:
        """Give that back."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


def timed(call: Callable[[], object]) -> Span:
    """Return when a call began and ended."""
    started = time.monotonic()
    call()
    return started, time.monotonic()


def size_bytes(spec: Spec) -> int:
    """Return how much host memory a link has."""
    return host.round_up(min(int(spec.plain_gib * GIB), spec.weights_bytes))


def times(spec: Spec) -> int:
    """Return how often a copy goes through that."""
    return -(-spec.weights_bytes // size_bytes(spec))


def open_link(spec: Spec, device: int) -> Link:
    """Return the link of a rank, without host memory yet."""
    if spec.on_gpus:
        return DeviceLink(device, size_bytes(spec), times(spec))
    return HostLink(size_bytes(spec), times(spec))


class HostLink:
    """Memory of this process, copied by the processor.

    Parameters
    ----------
    size_bytes, times : int
        How much, and how often a copy goes through it.
    """

    def __init__(self, size_bytes: int, times: int) -> None:
        self._size_bytes = size_bytes
        self._times = times
        self._memory: list[int] = []

    def touch(self) -> None:
        """Have two pieces of memory."""
        for _ in range(2):
            self._memory.append(_mapped(self._size_bytes))
            touch(self._memory[-1], self._size_bytes)

    def register(self) -> None:
        """Do nothing: no driver is asked."""

    map = unmap = register

    def copy_down(self) -> None:
        """Copy from the first to the second."""
        self._copy(*self._memory)

    def copy_up(self) -> None:
        """Copy from the second to the first."""
        self._copy(*reversed(self._memory))

    def _copy(self, source: int, target: int) -> None:
        for _ in range(self._times):
            host.copy_into(host.view(target, self._size_bytes), source)

    def close(self) -> None:
        """Give both back."""
        for address in self._memory:
            host.release(address, self._size_bytes)


class DeviceLink:
    """One mapping of pinned memory near a device, and memory of the device.

    Parameters
    ----------
    device : int
        Its ordinal.
    size_bytes, times : int
        How much of either, and how often a copy goes through it.
    """

    def __init__(self, device: int, size_bytes: int, times: int) -> None:
        from sleepbackends.cumem.driver import CudaDriver

        self._driver = CudaDriver()
        self._cu = self._driver._cu
        self._device = device
        self._size_bytes = size_bytes
        self._times = times
        self._near = Near(self._driver)
        self._host = _mapped(size_bytes)
        self._pinned: list[int] = []
        self._slots: list[DeviceSlots] = []
        with self._driver.current(device):
            self._memory = int(self._driver.call(self._cu.cuMemAlloc, size_bytes))

    def _chunks(self) -> Iterator[tuple[int, int]]:
        for at in range(0, self._size_bytes, arena.CHUNK_BYTES):
            yield self._host + at, min(arena.CHUNK_BYTES, self._size_bytes - at)

    def touch(self) -> None:
        """Touch it with as many threads as an arena has, on the node of the device."""
        node = self._near.node(self._device)

        def work(chunk: tuple[int, int]) -> None:
            self._near.go(node)
            touch(*chunk)

        with ThreadPoolExecutor(arena.THREADS) as pool:
            list(pool.map(work, self._chunks()))

    def register(self) -> None:
        """Register it in the chunks of an arena, in this thread."""
        for address, size in self._chunks():
            self._driver.pin(address, size)
            self._pinned.append(address)

    def copy_down(self) -> None:
        """Copy from the device, as one copy after another of all of it."""
        lane = self._driver.lane(self._device, "copy")
        for _ in range(self._times):
            for address, size in self._chunks():
                lane.to_host(address, self._memory + address - self._host, size)
        lane.wait()

    def copy_up(self) -> None:
        """Copy to the device."""
        lane = self._driver.lane(self._device, "copy")
        for _ in range(self._times):
            for address, size in self._chunks():
                lane.to_device(self._memory + address - self._host, address, size)
        lane.wait()

    def map(self) -> None:
        """Take physical memory and map it, piece by piece."""
        for at in range(0, self._size_bytes, MAPPED_BYTES):
            piece_bytes = min(MAPPED_BYTES, self._size_bytes - at)
            self._slots.append(DeviceSlots(self._driver, self._device, 1, piece_bytes))

    def unmap(self) -> None:
        """Unmap it and give it back."""
        while self._slots:
            self._slots.pop().close()

    def close(self) -> None:
        """Give everything back."""
        self.unmap()
        for address in self._pinned:
            self._driver.unpin(address)
        with self._driver.current(self._device):
            self._driver.call(self._cu.cuMemFree, self._memory)
        self._driver.close()
        host.release(self._host, self._size_bytes)


def _mapped(size_bytes: int) -> int:
    address = host.reserve(size_bytes)
    host.map_memory(address, size_bytes)
    return address


def all_seconds(spans: Sequence[Span]) -> float:
    """Return how long it took from the first beginning to the last end."""
    return max(end for _, end in spans) - min(start for start, _ in spans)


def each_seconds(spans: Sequence[Span]) -> list[float]:
    """Return how long each took."""
    return [end - start for start, end in spans]
