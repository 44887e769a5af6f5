"""Files without a name for saved bytes, and reads and writes that go on until all is done."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from sleepbackends.errors import SleepBackendsError, StorageError, StorageFullError

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_UNNAMED_FILES = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT})

# Linux moves at most this much in one call, and macOS refuses more.
_CALL_BYTES = 0x7FFF_F000


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all bytes at a position.

    Raises
    ------
    OSError
        If the kernel refuses some of them; those before were written.
    """
    done = 0
    while done < len(data):
        written = os.pwrite(fd, data[done : done + _CALL_BYTES], offset + done)
        if written == 0:
            raise OSError(errno.EIO, "nothing was written")
        done += written


def read_into(fd: int, data: memoryview, offset: int) -> int:
    """Read from a position until the memory is full or the file ends; return the bytes read.

    Raises
    ------
    OSError
        If the kernel cannot read some of them.
    """
    done = 0
    while done < len(data):
        got = os.preadv(fd, [data[done : done + _CALL_BYTES]], offset + done)
        if got == 0:
            break
        done += got
    return done


def open_unnamed(directory: Path, option: str) -> int:
    """Make a file that has no name, so that it is gone with the process however that ends.

    Parameters
    ----------
    directory : Path
        Where its bytes are.
    option : str
        What the user calls that directory.

    Returns
    -------
    int
        The descriptor, for reading and writing.

    Raises
    ------
    StorageError
        If none can be made there.
    """
    flags = getattr(os, "O_TMPFILE", 0)
    try:
        if flags:
            try:
                # Exclusive: it cannot be given a name later either.
                return os.open(directory, flags | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno not in _NO_UNNAMED_FILES:
                    raise
        fd, name = tempfile.mkstemp(prefix="sleepbackends-", dir=directory)
        os.unlink(name)
    except OSError as error:
        raise StorageError(
            f"no file can be made in {option} {os.fspath(directory)!r}: {error.strerror}",
            hint=f"choose a {option} that this user can write to",
        ) from error
    return fd


def available_bytes(directory: Path | int) -> int:
    """Return how much the file system of a directory or descriptor has left for this user."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def storage_error(
    what: str, error: OSError, size_bytes: int, fd: int, option: str
) -> SleepBackendsError:
    """Return the error of this package for one of a file.

    Parameters
    ----------
    what : str
        What could not be done, as a sentence without its end.
    error : OSError
        Why.
    size_bytes : int
        How many bytes it was about.
    fd : int
        The file.
    option : str
        What the user calls its directory.
    """
    message = f"{what}: {error.strerror}"
    if error.errno in _NO_SPACE:
        return StorageFullError(
            message,
            needed_bytes=size_bytes,
            available_bytes=available_bytes(fd),
            hint=f"free space there, or choose another {option}",
        )
    return StorageError(message, hint="repeat the call; if it goes on failing, look at the disk")
