"""Pinned host memory for saved bytes: made while it is already being used, kept by policy.

First touch and registration cost more than the copy itself when they come first (16 GiB: 0.35
and 0.4 s against 0.3 s). So a segment is one mapping with huge pages, made ready chunk by chunk:
many threads touch, and whoever copies registers a chunk and queues the copies into it. The driver
lets one thread in at a time: another one that registered would have each copy wait for a
chunk of its own.

A chunk that the driver refuses to pin is used all the same: copies to and from it then go
through the buffers of ``ring``, or if not even those are pinned, through the driver's own,
which is slow.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import ClassVar

from sleepbackends.errors import HostMemoryError, SleepBackendsError
from sleepbackends.host_limits import host_memory
from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm.driver import Driver
from sleepbackends.vmm.gaps import carve_all
from sleepbackends.vmm.near import Near
from sleepbackends.vmm.places import Retention, Room, Slot, extended
from sleepbackends.vmm.segment import Range, Segment
from sleepbackends.vmm.touch import touch

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20
"""What one thread makes ready at a time."""

SMALL_CHUNK_BYTES = 16 << 20
"""The same where others are not to notice: the driver lets nobody else in while it registers
memory, 1.6 ms for 64 MiB on an H200's host."""

THREADS = max(2, min(14, len(os.sched_getaffinity(0)) - 2))
"""How many threads touch memory at once; two processors are left to others."""


class Arena:
    """The pinned host memory of one backend.

    Parameters
    ----------
    driver : Driver
        Registers memory.
    budget_bytes : int, optional
        The most it may hold; None is limited by the machine alone.
    retention : {"retain", "release", "none"}
        What becomes of memory whose bytes were restored.
    """

    unit_bytes: ClassVar[int] = 1
    chunk_limit_bytes: ClassVar[int | None] = None
    fingerprints_all: ClassVar[bool] = False

    def __init__(self, driver: Driver, budget_bytes: int | None, retention: Retention) -> None:
        self._driver = driver
        self._near = Near(driver)
        self._budget_bytes = budget_bytes
        self._retention = retention
        self._segments: list[Segment] = []
        self._leaving: list[Segment] = []
        self._lock = threading.Lock()
        self._touching = ThreadPoolExecutor(THREADS, "sleepbackends-touch")
        # Those begin together while the arena is locked, which giving back waits for.
        self._trimming = ThreadPoolExecutor(1, "sleepbackends-trim")
        self._are_started = False

    @property
    def retains(self) -> bool:
        """Whether memory is kept that is not needed now."""
        return self._retention == "retain"

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory held now, used or not."""
        return sum(segment.size_bytes for segment in [*self._segments, *self._leaving])

    @property
    def used_bytes(self) -> int:
        """Bytes of host memory that hold something."""
        return sum(segment.size_bytes - segment.free_bytes for segment in list(self._segments))

    def check_room(self, size_bytes: int) -> None:
        """Check that slots of so many bytes in all can be had.

        Raises
        ------
        HostMemoryError
            If the budget or the machine has not enough.
        """
        self.trim(failed_only=True)
        with self._lock:
            self._check_room(size_bytes - sum(s.free_bytes for s in self._serving()))

    def take(
        self, sizes: Sequence[int], *, devices: Sequence[int] = (), at_ease: bool = False
    ) -> list[Slot]:
        """Take slots of these sizes; what is missing is touched in the background.

        Where the machine has several NUMA nodes, each is near its device, as far as there is room.

        At ease, it is made ready only as it is asked for, in small steps; whoever takes
        something otherwise, be it nothing, is in a hurry for all of it.

        Raises
        ------
        HostMemoryError
            If the budget or the machine has not enough; nothing was taken.
        """
        self.trim(failed_only=True)
        chunk_bytes = SMALL_CHUNK_BYTES if at_ease else CHUNK_BYTES
        nodes = [self._near.node(device) for device in devices] or [None] * len(sizes)
        slots = [Slot(()) for _ in sizes]
        with self._lock:
            before = len(self._segments)
            try:
                for node in dict.fromkeys(nodes):
                    mine = [number for number, of in enumerate(nodes) if of == node]
                    carved = self._carve([sizes[number] for number in mine], node, chunk_bytes)
                    for number, ranges in zip(mine, carved, strict=True):
                        slots[number].ranges = ranges
            except BaseException:
                for slot in slots:
                    _empty(slot)
                for segment in self._segments[before:]:
                    self._drop(segment)
                del self._segments[before:]
                raise
            if not at_ease:
                for segment in self._segments:
                    segment.begin()
            return slots

    def writable(
        self, rooms: Sequence[Room], sizes: Sequence[int], *, devices: Sequence[int] = ()
    ) -> list[Room]:
        """Return the rooms, which nobody else reads, with more where they are too small.

        Raises
        ------
        HostMemoryError
            If the budget or the machine has not enough; nothing was taken.
        """
        return extended(self, rooms, sizes, devices)

    def give_back(self, slot: Slot) -> None:
        """Give a slot back; the memory is kept or given back as the policy says."""
        with self._lock:
            _empty(slot)
            idle = any(segment.is_empty for segment in self._segments)
        if idle and self._retention == "release":
            self._trimming.submit(self._trim_aside)
        elif idle and self._retention == "none":
            self.trim()

    def trim(self, *, failed_only: bool = False) -> int:
        """Give back segments that hold nothing, or only those without memory; return the bytes."""
        with self._lock:
            idle = [s for s in self._segments if s.is_empty and (s.has_failed or not failed_only)]
            self._segments = [s for s in self._segments if s not in idle]
            self._leaving += idle
        kept = [segment for segment in idle if not self._drop(segment)]
        with self._lock:
            self._leaving = [s for s in self._leaving if s not in idle]
            self._segments += kept
        return sum(segment.size_bytes for segment in idle if segment not in kept)

    def _trim_aside(self) -> None:
        try:
            with self._driver.aside():
                self.trim()
        except SleepBackendsError:
            logger.exception("host memory that is not needed stays until the next time")

    def close(self) -> None:
        """Give everything back. Repeating the call does nothing."""
        self._touching.shutdown(wait=True)
        self._trimming.shutdown(wait=True)
        with self._lock:
            segments, self._segments = self._segments, []
        self._segments = [segment for segment in segments if not self._drop(segment)]

    def _serving(self) -> list[Segment]:
        return [s for s in self._segments if s.free_bytes and not s.has_failed]

    def _carve(self, sizes: Sequence[int], node: int | None, chunk_bytes: int) -> list[list[Range]]:
        """Take ranges for each size on a node, or where there is no room there, anywhere."""
        # Listed once: a segment may fail at any moment, and then the copies say so.
        serving = sorted(self._serving(), key=lambda segment: segment.node != node)
        near = [segment for segment in serving if segment.node == node]
        try:
            return self._carve_from(near, sizes, node, chunk_bytes)
        except HostMemoryError:
            if len(near) == len(serving):
                raise
            return self._carve_from(serving, sizes, node, chunk_bytes)

    def _carve_from(
        self, serving: list[Segment], sizes: Sequence[int], node: int | None, chunk_bytes: int
    ) -> list[list[Range]]:
        """Take ranges of some segments, and of a new one where they have too little."""
        missing = sum(sizes) - sum(segment.free_bytes for segment in serving)
        if missing > 0:
            self._check_room(missing)
            serving.append(self._new_segment(host.round_up(missing), chunk_bytes, node))
            self._segments.append(serving[-1])
        return carve_all(serving, sizes, Range)

    def _check_room(self, more: int) -> None:
        if more <= 0:
            return
        needed = self.held_bytes + host.round_up(more)
        if self._budget_bytes is not None and needed > self._budget_bytes:
            raise HostMemoryError(
                f"saving needs {needed} bytes of pinned memory and the budget is "
                f"{self._budget_bytes}",
                needed_bytes=needed,
                available_bytes=self._budget_bytes,
                hint="raise the option host_budget_bytes, or discard more tags",
            )
        memory = host_memory()
        if more > memory.available_bytes:
            raise HostMemoryError(
                f"saving needs {more} more bytes of host memory and {memory.available_bytes} "
                f"are available (limited by {memory.source})",
                needed_bytes=more,
                available_bytes=memory.available_bytes,
                hint="free host memory, raise that limit, or discard more tags",
            )

    def _new_segment(self, size_bytes: int, chunk_bytes: int, node: int | None = None) -> Segment:
        address = host.reserve(size_bytes)
        try:
            host.map_memory(address, size_bytes)
        except BaseException:
            host.release(address, size_bytes)
            raise
        touch = partial(self._begin_touching, node)
        return Segment(address, size_bytes, chunk_bytes, touch, self._pin, node)

    def _begin_touching(self, node: int | None, address: int, size_bytes: int) -> Future[None]:
        self._start()
        return self._touching.submit(self._touch, node, address, size_bytes)

    def _start(self) -> None:
        """Have all threads before the first touches memory: they need some themselves.

        A thread that begins may have to wait for what others touch, 70 ms for all of them.
        """
        if self._are_started:
            return
        self._are_started = True
        together = threading.Barrier(THREADS + 1)
        try:
            for _ in range(THREADS):
                self._touching.submit(together.wait)
            together.wait()
        except BaseException:
            together.abort()
            raise

    def _touch(self, node: int | None, address: int, size_bytes: int) -> None:
        self._near.go(node)
        touch(address, size_bytes)

    def _pin(self, address: int, size_bytes: int) -> bool:
        try:
            self._driver.pin(address, size_bytes)
        except HostMemoryError as error:
            logger.warning("%s; copies to and from it will be slow", error)
            return False
        return True

    def _drop(self, segment: Segment) -> bool:
        """Unpin and unmap a segment; tell whether that worked, else it can be tried again."""
        segment.leave()
        if segment.views:
            segment.leave(False)
            return False
        for number, touched in enumerate(segment.touched):
            if touched is not None and touched.cancel():
                segment.touched[number] = None
            elif touched is not None:
                wait([touched])
            if not segment.pinned.get(number):
                continue
            try:
                self._driver.unpin(segment.address_of(number))
            except SleepBackendsError:
                logger.exception("%d bytes of host memory stay pinned", segment.size_bytes)
                segment.leave(False)
                return False
            del segment.pinned[number]
        host.release(segment.address, segment.size_bytes)
        return True


def _empty(slot: Slot) -> None:
    """Return all of a slot to its segments."""
    for segment, offset, size_bytes in slot.ranges:
        segment.give_back(offset, size_bytes)
    slot.ranges = []
