"""Room for saved bytes on a disk, in unnamed files.

Threads of the ring write and read a chunk at a time, from and into their buffers. A file has
its storage before the first byte is copied, where its file system can reserve: a disk that is
too full says so while everything is still resident.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from sleepbackends.errors import StorageError, StorageFullError
from sleepbackends.hostmemory.files import available_bytes
from sleepbackends.vmm import places
from sleepbackends.vmm.gaps import carve_all
from sleepbackends.vmm.places import Retention, Room, Slot, extended
from sleepbackends.vmm.saved_file import OPTION, UNIT_BYTES, FileRange, SavedFile


class DiskStore:
    """Room for saved bytes in files of one directory.

    Parameters
    ----------
    directory : Path
        Where the files are.
    retention : {"retain", "release", "none"}
        What becomes of files whose bytes were restored: kept, or with either of the others
        given back at once.
    """

    unit_bytes: ClassVar[int] = UNIT_BYTES
    fingerprints_all: ClassVar[bool] = True

    def __init__(self, directory: Path, retention: Retention) -> None:
        self._directory = directory
        self._retention = retention
        self._files: list[SavedFile] = []
        self._direct = True
        self._lock = threading.Lock()

    @property
    def chunk_limit_bytes(self) -> int:
        """The most bytes of a chunk: what a buffer of the ring holds."""
        return places.BUFFER_BYTES

    @property
    def retains(self) -> bool:
        """Whether files are kept that are not needed now."""
        return self._retention == "retain"

    @property
    def held_bytes(self) -> int:
        """How long all files are."""
        return sum(file.size_bytes for file in list(self._files))

    @property
    def used_bytes(self) -> int:
        """How much of the files holds something."""
        return sum(file.size_bytes - file.free_bytes for file in list(self._files))

    def check_room(self, size_bytes: int) -> None:
        """Check that slots of so many bytes in all can be had.

        Raises
        ------
        StorageFullError
            If the file system has not enough.
        StorageError
            If the directory is gone.
        """
        with self._lock:
            self._check_room(size_bytes - self._free_bytes())

    def take(
        self, sizes: Sequence[int], *, devices: Sequence[int] = (), at_ease: bool = False
    ) -> list[Slot]:
        """Take slots of these sizes; what is missing is one more file, whatever it is for.

        Raises
        ------
        StorageFullError
            If the file system has not enough; nothing was taken.
        StorageError
            If no file can be made; nothing was taken.
        """
        with self._lock:
            missing = sum(sizes) - self._free_bytes()
            if missing > 0:
                self._check_room(missing)
                self._files.append(self._new_file(missing))
            serving = [file for file in self._files if file.free_bytes]
            return [Slot(ranges) for ranges in carve_all(serving, sizes, FileRange)]

    def writable(
        self, rooms: Sequence[Room], sizes: Sequence[int], *, devices: Sequence[int] = ()
    ) -> list[Room]:
        """Return the rooms, which nobody else reads, with more where they are too small.

        Raises
        ------
        StorageFullError, StorageError
            As ``take``; nothing was taken.
        """
        return extended(self, rooms, sizes, devices)

    def give_back(self, slot: Slot) -> None:
        """Give a slot back; a file that holds nothing is kept or given back as the policy says."""
        with self._lock:
            for part in slot.ranges:
                part.file.give_back(part.offset, part.size_bytes)
            slot.ranges = []
        if not self.retains:
            self.trim()

    def trim(self) -> int:
        """Give files back that hold nothing; return their bytes."""
        with self._lock:
            idle = [file for file in self._files if file.free_bytes == file.size_bytes]
            self._files = [file for file in self._files if file not in idle]
        for file in idle:
            file.close()
        return sum(file.size_bytes for file in idle)

    def close(self) -> None:
        """Give all files back, whatever they hold. Repeating the call does nothing."""
        with self._lock:
            files, self._files = self._files, []
        for file in files:
            file.close()

    def _free_bytes(self) -> int:
        return sum(file.free_bytes for file in self._files)

    def _check_room(self, more: int) -> None:
        if more <= 0:
            return
        try:
            available = available_bytes(self._directory)
        except OSError as error:
            raise StorageError(
                f"{OPTION} {os.fspath(self._directory)!r} cannot be used: {error.strerror}",
                hint="make it again, or choose another",
            ) from error
        if more > available:
            raise StorageFullError(
                f"saving needs {more} more bytes in {os.fspath(self._directory)!r}, which has room "
                f"for {available}",
                needed_bytes=more,
                available_bytes=available,
                hint=f"free space there, choose another {OPTION}, or discard more tags",
            )

    def _new_file(self, size_bytes: int) -> SavedFile:
        self._direct = self._direct and all(file.is_direct for file in self._files)
        file = SavedFile(self._directory, size_bytes, direct=self._direct)
        self._direct = self._direct and file.is_direct
        return file
