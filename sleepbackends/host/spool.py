"""The spool: one unnamed file that holds saved bytes, checked when they come back.

The file has no name, so that it is gone with the process however that ends. It is divided
into slots of one chunk each. A block takes as many slots as it has chunks, anywhere in the
file, the lowest free ones first; so the file has no more slots than were ever taken at
the same time, and nothing can fragment. A file for each block would be simpler still, but
ten thousand blocks would meet the limit of open files. A slot that is only partly used or
was given back takes no storage, because the rest of it is a hole.
"""

from __future__ import annotations

import heapq
import os
import secrets
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from sleepbackends.errors import SleepBackendsError, StorageError
from sleepbackends.hostmemory import driver
from sleepbackends.hostmemory.files import (
    available_bytes,
    open_unnamed,
    read_into,
    storage_error,
    write_all,
)


@dataclass
class Chunk:
    """Saved bytes in one slot of the file.

    Parameters
    ----------
    spool : Spool
        Whose file.
    slot : int
        Which slot.
    size_bytes : int
        How many bytes.
    digest : bytes
        Their hash, once they were written.
    """

    spool: Spool
    slot: int
    size_bytes: int
    digest: bytes = b""


class Spool:
    """Writes and reads chunks at their slots.

    ``write`` and ``read`` may run in several threads at once, for different chunks;
    everything else is called by one thread at a time.

    Parameters
    ----------
    directory : Path
        Where the file is.
    chunk_bytes : int
        The size of a slot.
    drop_page_cache : bool
        Write through to the device and drop the cached pages.

    Raises
    ------
    StorageError
        If no file can be made there.
    """

    def __init__(self, directory: Path, chunk_bytes: int, *, drop_page_cache: bool) -> None:
        self.directory = directory
        self._chunk_bytes = chunk_bytes
        self._drop_page_cache = drop_page_cache
        # Secret, so that nobody who can write to the file can write what passes for saved.
        self._seed = secrets.randbits(64)
        self._slots = 0
        self._free_slots: list[int] = []
        self._process = os.getpid()
        self._fd = open_unnamed(directory, "spool_directory")
        self._close_file = weakref.finalize(self, os.close, self._fd)

    def allot(self, size_bytes: int) -> list[Chunk]:
        """Take slots for so many bytes.

        Raises
        ------
        StorageError
            If this process was forked from the one that the spool belongs to.
        """
        self._check_process()
        chunks = []
        for offset in range(0, size_bytes, self._chunk_bytes):
            if self._free_slots:
                slot = heapq.heappop(self._free_slots)
            else:
                slot = self._slots
                self._slots += 1
            chunks.append(Chunk(self, slot, min(self._chunk_bytes, size_bytes - offset)))
        return chunks

    def write(self, chunk: Chunk, data: memoryview) -> None:
        """Hash the bytes of a chunk and write them.

        Raises
        ------
        StorageFullError
            If the file system has no space left.
        StorageError
            If they cannot be written otherwise.
        """
        offset = chunk.slot * self._chunk_bytes
        chunk.digest = self._digest(data)
        try:
            write_all(self._fd, data, offset)
            if self._drop_page_cache:
                os.fdatasync(self._fd)
                os.posix_fadvise(self._fd, offset, len(data), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._error("written", error, len(data)) from error

    def read(self, chunk: Chunk, into: memoryview) -> bool:
        """Read a chunk into place and tell whether it is what was written.

        Raises
        ------
        StorageError
            If it cannot be read.
        """
        self._check_process()
        try:
            got = read_into(self._fd, into, chunk.slot * self._chunk_bytes)
        except OSError as error:
            raise self._error("read", error, len(into)) from error
        return got == len(into) and self._digest(into) == chunk.digest

    def give_back(self, chunks: Iterable[Chunk]) -> None:
        """Give back slots and their storage. Never raises."""
        if os.getpid() != self._process or not self._close_file.alive:
            # A forked child shares the file, and the parent still wants what is in it.
            return
        for chunk in chunks:
            driver.punch_hole(self._fd, chunk.slot * self._chunk_bytes, chunk.size_bytes)
            heapq.heappush(self._free_slots, chunk.slot)
        if len(self._free_slots) == self._slots:
            self._empty()

    def available_bytes(self) -> int:
        """Return how much storage the file system has left for this user."""
        return available_bytes(self._fd)

    def close(self) -> None:
        """Drop everything. Repeating the call does nothing."""
        self._close_file()

    def _empty(self) -> None:
        try:
            os.ftruncate(self._fd, 0)
        except OSError:
            # What the holes did not give back is overwritten by the next save.
            return
        self._slots = 0
        self._free_slots.clear()

    def _digest(self, data: memoryview) -> bytes:
        return xxhash.xxh3_128_digest(data, seed=self._seed)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StorageError(
                f"the spool belongs to process {self._process}, of which this one is a fork",
                hint="create a backend in each process",
                recoverable=False,
            )

    def _error(self, verb: str, error: OSError, size_bytes: int) -> SleepBackendsError:
        what = f"spool in {os.fspath(self.directory)!r} cannot be {verb}"
        return storage_error(what, error, size_bytes, self._fd, "spool_directory")
