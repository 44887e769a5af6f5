"""The arena of a backend that shares its saved bytes with other processes.

Bytes are saved in private memory as in every arena. Later they may move to a file that all
processes with the same bytes have mapped. Nobody writes to those: a chunk that is to be saved
again gets private memory first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import compress
from operator import not_

from sleepbackends.errors import HostMemoryError, SleepBackendsError
from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm import arena
from sleepbackends.vmm.arena import Arena
from sleepbackends.vmm.driver import Driver
from sleepbackends.vmm.places import Room, Slot
from sleepbackends.vmm.segment import Range, Segment
from sleepbackends.vmm.shared import Shared, SharedStore

logger = logging.getLogger(__name__)


class SharedSegment(Segment):
    """One mapped and pinned file, all of it taken at first."""

    def __init__(self, shared: Shared) -> None:
        size_bytes = shared.size_bytes
        super().__init__(
            shared.address, size_bytes, size_bytes, lambda *_: Future(), lambda *_: True
        )
        self.pinned[0] = True
        self.shared = shared
        self.carve(self.size_bytes)


class SharedArena(Arena):
    """The pinned host memory of one backend, and its shared files, which the budget is not for.

    Parameters
    ----------
    driver : Driver
        Registers memory.
    budget_bytes : int, optional
        The most private memory it may hold; None is limited by the machine alone.
    shared : SharedStore
        The files.

    Raises
    ------
    StorageError
        If the directory of the files cannot be used.
    """

    def __init__(self, driver: Driver, budget_bytes: int | None, shared: SharedStore) -> None:
        shared.open()
        super().__init__(driver, budget_bytes, "retain")
        self._shared = shared
        self._shared_segments: list[SharedSegment] = []

    @property
    def shared_bytes(self) -> int:
        """Bytes in shared files that are used here."""
        return sum(segment.size_bytes for segment in list(self._shared_segments))

    def share(self, saved: Range, fingerprint: int) -> Range | None:
        """Return a range of a shared file with the same bytes; None if there is none.

        It is given back like any other. If somebody writes to the private one meanwhile, it is of
        no use.
        """
        size_bytes = saved.size_bytes
        shared = self._shared.offer(saved.address, size_bytes, fingerprint)
        if shared is None:
            return None
        length = host.round_up(size_bytes)
        try:
            # Drivers pin for writing unless told otherwise, so only then can writes be forbidden.
            self._driver.pin(shared.address, length)
        except HostMemoryError as error:
            logger.info("%d saved bytes are not shared: %s", size_bytes, error)
            self._shared.leave(shared)
            return None
        with suppress(SleepBackendsError):  # it only guards against mistakes of this process
            host.forbid_writing(shared.address, length)
        segment = SharedSegment(shared)
        with self._lock:
            self._shared_segments.append(segment)
        return Range(segment, 0, size_bytes)

    def writable(
        self, rooms: Sequence[Room], sizes: Sequence[int], *, devices: Sequence[int] = ()
    ) -> list[Room]:
        """Return private memory for each room: its own and what it lacks, or new if it is shared.

        Raises
        ------
        HostMemoryError
            If the budget or the machine has not enough; nothing was taken.
        """
        private = [not is_shared(room[0]) for room in rooms]
        fresh = self._take_whole(list(compress(sizes, map(not_, private))))
        own_rooms, own_sizes = list(compress(rooms, private)), list(compress(sizes, private))
        try:
            of_devices = list(compress(devices, private))
            own = iter(super().writable(own_rooms, own_sizes, devices=of_devices))
        except BaseException:
            self.give_back(Slot(fresh))
            raise
        new = iter(fresh)
        return [next(own) if is_private else [next(new)] for is_private in private]

    def give_back(self, slot: Slot) -> None:
        """Give a slot back: private memory is kept, files are no longer used."""
        super().give_back(slot)
        self._drop_shared()

    def trim(self, *, failed_only: bool = False) -> int:
        """Give back segments that hold nothing, or only those without memory; return the bytes."""
        self._drop_shared()
        return super().trim(failed_only=failed_only)

    def close(self) -> None:
        """Give everything back, and remove files that nobody uses. Repeating it does nothing."""
        super().close()
        with self._lock:
            for segment in self._shared_segments:
                if not segment.free_bytes:
                    segment.give_back(0, segment.size_bytes)
        self._drop_shared()
        try:
            self._shared.clean()
        except SleepBackendsError:
            logger.exception("files that nobody uses may be left")

    def _take_whole(self, sizes: Sequence[int]) -> list[Range]:
        """Take one range for each size."""
        if not sizes:
            return []
        self.trim(failed_only=True)
        with self._lock:
            found = [self._whole(size) for size in sizes]
            missing = sum(s for s, part in zip(sizes, found, strict=True) if part is None)
            try:
                if missing:
                    self._check_room(missing)
                    self._segments.append(
                        self._new_segment(host.round_up(missing), arena.CHUNK_BYTES)
                    )
                    self._segments[-1].begin()
            except BaseException:
                for part in filter(None, found):
                    part.segment.give_back(part.offset, part.size_bytes)
                raise
            last = self._segments[-1]
            return [
                part or Range(last, *last.carve(size))
                for size, part in zip(sizes, found, strict=True)
            ]

    def _whole(self, size_bytes: int) -> Range | None:
        for segment in self._serving():
            offset = segment.carve_whole(size_bytes)
            if offset is not None:
                return Range(segment, offset, size_bytes)
        return None

    def _drop_shared(self) -> None:
        with self._lock:
            idle = [segment for segment in self._shared_segments if segment.is_empty]
            self._shared_segments = [s for s in self._shared_segments if s not in idle]
        for segment in idle:
            try:
                self._driver.unpin(segment.address)
            except SleepBackendsError:
                logger.exception("%d bytes of shared memory stay pinned", segment.size_bytes)
                with self._lock:
                    self._shared_segments.append(segment)
            else:
                self._shared.leave(segment.shared)


def is_shared(saved: object) -> bool:
    """Tell whether a range lies in a shared file."""
    return isinstance(saved, Range) and isinstance(saved.segment, SharedSegment)
