"""The lock of the spool's directory: one backend at a time."""

from __future__ import annotations

import os
from pathlib import Path

from sleepbackends.errors import StorageError


def lock_directory(directory: Path) -> int:
    """Lock a directory for this backend alone; return the descriptor that holds the lock.

    Raises
    ------
    StorageError
        If another backend, here or in another process, has it.
    """
    import fcntl  # not on every platform, where probe() still has to say so

    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(
            f"spool directory {os.fspath(directory)!r} cannot be opened: {error.strerror}",
            hint="choose another spool_directory",
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise StorageError(
                f"spool directory {os.fspath(directory)!r} is in use by another backend",
                hint="give each backend its own spool_directory (one for each rank), close "
                "the other one, or leave spool_directory unset",
            ) from None
        raise StorageError(
            f"spool directory {os.fspath(directory)!r} cannot be locked: {error.strerror}",
            hint="choose a spool_directory on a local disk",
        ) from error
    return fd


def unlock_directory(fd: int) -> None:
    """Give the lock back, also where a forked child still has the descriptor."""
    import fcntl

    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
