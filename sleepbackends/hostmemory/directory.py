"""A directory for saved bytes: which one, and whether it will do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sleepbackends.errors import StorageError

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs", "hugetlbfs"})
_MOUNTS = Path("/proc/self/mountinfo")


def choose_directory(
    wanted: Path | None, option: str, *, allow_memory: bool = False, allow_hint: str = ""
) -> Path:
    """Return a directory that files can be made in and that gives memory back.

    Parameters
    ----------
    wanted : Path or None
        The user's choice, created (mode 0700) if it is missing. None takes the first of
        the temporary directory and ``/var/tmp`` that is not kept in memory.
    option : str
        What the user calls it.
    allow_memory : bool
        Accept one that is.
    allow_hint : str
        How the user does that, as the end of a hint.

    Raises
    ------
    StorageError
        If there is none, or the wanted one will not do.
    """
    if wanted is None:
        return _default_directory(option, allow_memory, allow_hint)
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{option} {os.fspath(wanted)!r} cannot be created: {error.strerror}",
            hint=f"choose another {option}",
        ) from error
    kind = filesystem_of(wanted)
    if kind in _IN_MEMORY and not allow_memory:
        raise StorageError(
            f"{option} {os.fspath(wanted)!r} is on {kind}, which is memory: saving "
            "there gives nothing back",
            hint=f"choose a {option} on a disk{allow_hint}",
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


def _default_directory(option: str, allow_memory: bool, allow_hint: str) -> Path:
    refused = []
    for candidate in dict.fromkeys(map(Path, (tempfile.gettempdir(), "/var/tmp"))):  # noqa: S108
        if not os.access(candidate, os.W_OK | os.X_OK):
            refused.append(f"{candidate} is not writable")
        elif not allow_memory and filesystem_of(candidate) in _IN_MEMORY:
            refused.append(f"{candidate} is kept in memory")
        else:
            return candidate
    raise StorageError(
        f"no directory for {option}: {', '.join(refused)}",
        hint=f"set {option} to a directory on a disk{allow_hint}",
    )
