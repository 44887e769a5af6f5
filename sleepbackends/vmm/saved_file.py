"""A file for saved bytes: written and read past the page cache where that works, and checked.

What is written is fingerprinted on its way, and what is read is compared with that before a
device gets it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from sleepbackends.errors import ContentsLostError, SleepBackendsError
from sleepbackends.hostmemory import driver as host
from sleepbackends.hostmemory.files import open_unnamed, read_into, storage_error, write_all
from sleepbackends.vmm.fingerprint import host_fingerprint
from sleepbackends.vmm.gaps import Gaps

logger = logging.getLogger(__name__)

OPTION = "disk_directory"
"""What users call the directory of the files."""

UNIT_BYTES = 4096
"""What positions and sizes are multiples of: as much as any common disk asks for."""

_NOTHING = -1  # the fingerprint of no bytes at all


class SavedFile(Gaps):
    """One unnamed file, as long as it will ever be.

    Parameters
    ----------
    directory : Path
        Where its storage is.
    size_bytes : int
        How long it is.
    direct : bool
        Whether to go past the page cache, if the file system agrees.

    Raises
    ------
    StorageFullError
        If there is not so much storage.
    StorageError
        If no file can be made.
    """

    def __init__(self, directory: Path, size_bytes: int, *, direct: bool) -> None:
        super().__init__(size_bytes)
        self._directory = directory
        self._fd = open_unnamed(directory, OPTION)
        self.close = weakref.finalize(self, os.close, self._fd)
        try:
            host.preallocate(self._fd, size_bytes)
            self.is_direct = direct and self._go_direct()
        except OSError as error:
            failed = self._error("made", error, size_bytes)
            self.close()
            raise failed from error

    def write(self, data: memoryview, offset: int) -> None:
        """Write at a position; may run in several threads at once.

        Raises
        ------
        StorageFullError, StorageError
            If that fails.
        """
        try:
            self._tried(write_all, data, offset)
        except OSError as error:
            raise self._error("written", error, len(data)) from error

    def read(self, data: memoryview, offset: int) -> int:
        """Read from a position and return how many bytes there were; as ``write``.

        Raises
        ------
        StorageError
            If that fails.
        """
        try:
            return self._tried(read_into, data, offset) or 0
        except OSError as error:
            raise self._error("read", error, len(data)) from error

    def _tried(
        self, call: Callable[[int, memoryview, int], int | None], data: memoryview, offset: int
    ) -> int | None:
        try:
            return call(self._fd, data, offset)
        except OSError as error:
            # Some file systems take the flag and then refuse what it stands for.
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags() & ~os.O_DIRECT)
            if self.is_direct:
                self.is_direct = False
                self._warn()
            return call(self._fd, data, offset)

    def _go_direct(self) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags() | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._warn()
            return False
        return True

    def _warn(self) -> None:
        logger.warning(
            "the file system of %s takes no direct I/O: saved bytes go through the page cache",
            self._directory,
        )

    def _flags(self) -> int:
        return fcntl.fcntl(self._fd, fcntl.F_GETFL)

    def _error(self, verb: str, error: OSError, size_bytes: int) -> SleepBackendsError:
        what = f"{size_bytes} bytes of a file in {os.fspath(self._directory)!r} cannot be {verb}"
        return storage_error(what, error, size_bytes, self._fd, OPTION)


class FileRange:
    """Consecutive bytes of a file that are written and read as one: ``Saved``, and its ``Place``.

    Parameters
    ----------
    file : SavedFile
        Which file.
    offset : int
        Where they begin, a multiple of ``UNIT_BYTES``.
    size_bytes : int
        How many there are. On the disk they are padded to a multiple of ``UNIT_BYTES``.
    """

    host: ClassVar[None] = None
    pinned: ClassVar[bool] = False
    has_failed: ClassVar[bool] = False

    def __init__(self, file: SavedFile, offset: int, size_bytes: int) -> None:
        self.file = file
        self.offset = offset
        self.size_bytes = size_bytes
        self._written = _NOTHING

    def part(self, start: int, size_bytes: int) -> FileRange:
        """Return a range of some of its bytes, which knows nothing of what was written here."""
        return FileRange(self.file, self.offset + start, size_bytes)

    def pieces(self) -> Iterator[FileRange]:
        """Return itself: it is written and read as one."""
        yield self

    def wait(self) -> None:
        """Do nothing: a file can be used at once."""

    def write(self, source: int) -> None:
        """Fingerprint the bytes at an address and write them.

        They lie in a buffer that is large enough for the padding, which is written too.

        Raises
        ------
        StorageFullError, StorageError
            If they cannot be written; what is on the disk then passes for nothing.
        """
        self._written = _NOTHING
        fingerprint = host_fingerprint(source, self.size_bytes)
        self.file.write(host.view(source, self._padded_bytes), self.offset)
        self._written = fingerprint

    def read(self, target: int) -> bool:
        """Read the bytes to an address, with padding; tell whether they are what was written.

        Raises
        ------
        StorageError
            If they cannot be read.
        """
        got = self.file.read(host.view(target, self._padded_bytes), self.offset)
        return got >= self.size_bytes and (
            host_fingerprint(target, self.size_bytes) == self._written
        )

    def view(self, start: int, size_bytes: int) -> memoryview:
        """Read all of it, and return some of its bytes, counted from the first.

        Raises
        ------
        ContentsLostError
            If they are not what was written.
        StorageError
            If they cannot be read.
        """
        memory = mmap.mmap(-1, self._padded_bytes)
        if not self.read(ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))):
            raise ContentsLostError(
                f"{self.size_bytes} saved bytes are damaged on the disk",
                hint="resume and reload the tag",
            )
        return memoryview(memory)[start : start + size_bytes].toreadonly()

    def is_followed_by(self, other: object) -> bool:
        """Tell that a view of it ends with it."""
        return False

    def fingerprinting(self) -> Callable[[], int]:
        """Return what tells the fingerprint of what was written last.

        The bytes on the disk are not read for it: they are compared with it when they are.
        """
        written = self._written
        return lambda: written

    @property
    def _padded_bytes(self) -> int:
        return host.round_up(self.size_bytes, UNIT_BYTES)
