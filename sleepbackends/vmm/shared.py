"""Files in memory that hold saved bytes for every process of a user that has the same ones.

A file is named by a strong hash of its bytes, their number and their fingerprint, and is never
written again once it has that name. Whoever uses a file holds a shared ``flock`` on it, by way
of its mapping: the kernel gives the lock up with the last mapping, however a process ends. A
file on which somebody gets the exclusive lock is used by nobody and may go.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sleepbackends.errors import SleepBackendsError, StorageError
from sleepbackends.hostmemory import driver as host
from sleepbackends.hostmemory.files import available_bytes, write_all

logger = logging.getLogger(__name__)

OPTION = "share_directory"
DEFAULT_PARENT = Path("/dev/shm")  # noqa: S108 - the directory in it is checked to be ours

LEFT_FREE = 8
"""One part in so many of the file system is left to whoever else relies on it."""

_UNFINISHED = ".new-"
_NAME = re.compile(r"[0-9a-f]{64}-\d+-[0-9a-f]{32}|\.new-\w+")


@dataclass(frozen=True)
class SharedCopy:
    """A file of the directory.

    Parameters
    ----------
    name : str
        Its name.
    size_bytes : int
        How much memory it takes.
    in_use : bool
        Whether a process has it mapped.
    """

    name: str
    size_bytes: int
    in_use: bool


class Shared(NamedTuple):
    """The bytes of a file, as this process has them mapped.

    Parameters
    ----------
    address : int
        Of the first.
    size_bytes : int
        How many there are.
    name : str
        Of the file.
    """

    address: int
    size_bytes: int
    name: str


class SharedStore:
    """The directory of shared files of this user.

    Parameters
    ----------
    parent : Path, optional
        Where the directory ``sleepbackends-<uid>`` is; ``/dev/shm`` by default.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self.directory = (parent or DEFAULT_PARENT) / f"sleepbackends-{os.geteuid()}"

    def open(self) -> None:
        """Have the directory, and remove what a process left there that has ended.

        Raises
        ------
        StorageError
            If it cannot be made, is somebody else's, or others may look into it.
        """
        try:
            with suppress(FileExistsError):
                self.directory.mkdir(mode=0o700)
        except OSError as error:
            raise StorageError(
                f"{os.fspath(self.directory)!r} cannot be created: {error.strerror}",
                hint=f"choose another {OPTION}, or turn share_copies off",
            ) from error
        self.clean()

    def offer(self, address: int, size_bytes: int, fingerprint: int) -> Shared | None:
        """Map a shared file with the bytes at an address, or return None; see ``leave``.

        The bytes were compared with those in the file. The mapping can be written, so that a
        driver pins it, and must not be. None where there is no room, or a file of this name
        cannot be trusted; that is not an error.

        Parameters
        ----------
        address : int
            Of the bytes, which nobody changes meanwhile.
        size_bytes : int
            How many there are.
        fingerprint : int
            Theirs.
        """
        data = host.view(address, size_bytes)
        digest = hashlib.blake2b(data, digest_size=32).hexdigest()
        name = f"{digest}-{size_bytes}-{fingerprint:032x}"
        try:
            shared = Shared(self._mapped(name, data), size_bytes, name)
        except (OSError, SleepBackendsError) as error:
            logger.info("%d saved bytes are not shared: %s", size_bytes, error)
            return None
        if host.equal(shared.address, address, size_bytes):
            return shared
        logger.info("%s is damaged, or what was offered changed meanwhile", name)
        self.leave(shared)
        return None

    def leave(self, shared: Shared) -> None:
        """Unmap a file, and remove it if nobody else uses it.

        Raises
        ------
        MechanismError
            If it is not mapped.
        """
        host.release(shared.address, host.round_up(shared.size_bytes))
        self._remove_unused(shared.name)

    def copies(self) -> list[SharedCopy]:
        """List the files that are there now; none if there is no directory.

        Raises
        ------
        StorageError
            If the directory is somebody else's, or others may look into it.
        """
        found = []
        for name in self._names():
            with suppress(OSError), self._unused(name) as fd:
                size_bytes = (self.directory / name).lstat().st_size
                found.append(SharedCopy(name, size_bytes, in_use=fd is None))
        return found

    def clean(self) -> int:
        """Remove files that no process uses; return their bytes.

        Raises
        ------
        StorageError
            If the directory is somebody else's, or others may look into it.
        """
        return sum(map(self._remove_unused, self._names()))

    def _names(self) -> list[str]:
        try:
            status = self.directory.lstat()
        except FileNotFoundError:
            return []
        if not _is_private(status) or not stat.S_ISDIR(status.st_mode):
            raise StorageError(
                f"{os.fspath(self.directory)!r} is not a directory of this user alone",
                hint=f"remove it, choose another {OPTION}, or turn share_copies off",
            )
        return sorted(filter(_NAME.fullmatch, os.listdir(self.directory)))

    def _mapped(self, name: str, data: memoryview) -> int:
        fd = self._opened(name, len(data))
        if fd is None:
            fd = self._made(name, data)
        try:
            return _map(fd, len(data))
        finally:
            os.close(fd)  # the mapping keeps the lock

    def _opened(self, name: str, size_bytes: int) -> int | None:
        """Open a file and lock it against removal; None if there is none."""
        try:
            fd = os.open(self.directory / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            status = os.fstat(fd)
            if status.st_nlink == 0:  # removed between the two calls
                os.close(fd)
                return None
            if not stat.S_ISREG(status.st_mode) or not _is_private(status):
                raise StorageError(f"{name} is not a file of this user alone")
            if status.st_size != size_bytes:
                raise StorageError(f"{name} has {status.st_size} bytes instead of {size_bytes}")
        except BaseException:
            os.close(fd)
            self._remove_unused(name)
            raise
        return fd

    def _made(self, name: str, data: memoryview) -> int:
        """Make the file, or open the one that another process made meanwhile."""
        statistics = os.statvfs(self.directory)
        left = statistics.f_blocks * statistics.f_frsize // LEFT_FREE
        if available_bytes(self.directory) < len(data) + left:
            raise OSError(errno.ENOSPC, "there is not enough room", os.fspath(self.directory))
        fd, path = tempfile.mkstemp(prefix=_UNFINISHED, dir=self.directory)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            write_all(fd, data, 0)
            with suppress(FileExistsError):
                os.link(path, self.directory / name)
                return fd
        except BaseException:
            os.close(fd)
            raise
        finally:
            Path(path).unlink(missing_ok=True)
        os.close(fd)
        theirs = self._opened(name, len(data))
        if theirs is None:
            raise StorageError(f"{name} came and went")
        return theirs

    @contextmanager
    def _unused(self, name: str) -> Iterator[int | None]:
        """Give the file, kept from whoever wants to use it; None if somebody does."""
        fd = os.open(self.directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield fd
        finally:
            os.close(fd)

    def _remove_unused(self, name: str) -> int:
        path = self.directory / name
        try:
            with self._unused(name) as fd:
                if fd is None:
                    return 0
                status = os.fstat(fd)
                # Another of the same name may be there by now.
                if not os.path.samestat(status, path.lstat()):
                    return 0
                path.unlink()
                return status.st_size
        except OSError as error:
            logger.debug("%s stays: %s", path, error)
            return 0


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _map(fd: int, size_bytes: int) -> int:
    length = host.round_up(size_bytes)
    address = host.reserve(length)
    try:
        host.map_file(address, length, fd)
    except BaseException:
        host.release(address, length)
        raise
    return address
