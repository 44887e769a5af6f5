"""The directory of the spool: which one, whether it will do, and who else uses it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sleepbackends.errors import StorageError

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs", "hugetlbfs"})
_MOUNTS = Path("/proc/self/mountinfo")


def choose_directory(wanted: Path | None, allow_memory_filesystem: bool) -> Path:
    """Return a directory that files can be made in and that gives memory back.

    Parameters
    ----------
    wanted : Path or None
        The user's choice, created (mode 0700) if it is missing. None takes the first of
        the temporary directory and ``/var/tmp`` that is not kept in memory.
    allow_memory_filesystem : bool
        Accept one that is.

    Raises
    ------
    StorageError
        If there is none, or the wanted one will not do.
    """
    if wanted is None:
        return _default_directory(allow_memory_filesystem)
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"spool directory {os.fspath(wanted)!r} cannot be created: {error.strerror}",
            hint="choose another spool_directory",
        ) from error
    kind = filesystem_of(wanted)
    if kind in _IN_MEMORY and not allow_memory_filesystem:
        raise StorageError(
            f"spool directory {os.fspath(wanted)!r} is on {kind}, which is memory: saving "
            "there gives nothing back",
            hint="choose a spool_directory on a disk, or set allow_memory_filesystem=True",
        )
    return wanted


def filesystem_of(path: Path) -> str | None:
    """Return the type of the file system a path is on, or None where nothing tells."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return None
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            return source.split()[0]
    return None


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


def _default_directory(allow_memory_filesystem: bool) -> Path:
    refused = []
    for candidate in dict.fromkeys(map(Path, (tempfile.gettempdir(), "/var/tmp"))):  # noqa: S108
        if not os.access(candidate, os.W_OK | os.X_OK):
            refused.append(f"{candidate} is not writable")
        elif not allow_memory_filesystem and filesystem_of(candidate) in _IN_MEMORY:
            refused.append(f"{candidate} is kept in memory")
        else:
            return candidate
    raise StorageError(
        f"no directory for the spool: {', '.join(refused)}",
        hint="set spool_directory to a directory on a disk, or allow_memory_filesystem=True",
    )
