"""How much host memory this process may still take, by the kernel and its control group."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of the page size; nothing real is so big."""


@dataclass(frozen=True)
class HostMemory:
    """What this process may still take.

    Parameters
    ----------
    available_bytes : int
        How much can be allocated before the kernel has to reclaim anything but page cache.
    limit_bytes : int or None
        The tightest limit of the control groups this process is in; None without one.
    source : str
        What sets ``available_bytes``: ``"machine"`` or the folder of a control group.
    """

    available_bytes: int
    limit_bytes: int | None
    source: str


@dataclass(frozen=True)
class _Dialect:
    """How one version of control groups names its files."""

    limit: str
    usage: str
    page_cache: tuple[str, str]


_V1 = _Dialect(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Dialect("memory.max", "memory.current", ("inactive_file", "active_file"))


@dataclass(frozen=True)
class _Mount:
    """A mounted hierarchy of control groups: which part of it (``root``) is visible where."""

    root: PurePosixPath
    point: PurePosixPath
    dialect: _Dialect


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Measure how much host memory this process may still take.

    The least of what the machine has available and what each control group, up to the
    outermost that is visible, has left; page cache counts as left, since the kernel drops it
    first. Missing or unreadable files count as no limit.

    Parameters
    ----------
    root : Path
        Where ``proc`` and the mount points are looked for.
    """
    available, source = psutil.virtual_memory().available, "machine"
    limits = []
    for folder, dialect in _groups(root):
        limit = _read_int(folder / dialect.limit)
        if limit is None or limit >= _UNLIMITED_BYTES:
            continue
        limits.append(limit)
        left = min(limit, max(0, limit - _used_bytes(folder, dialect)))
        if left < available:
            available, source = left, str(folder)
    return HostMemory(available, min(limits, default=None), source)


def memlock_limit_bytes() -> int | None:
    """Return how many bytes this process may lock in memory; None means any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _groups(root: Path) -> Iterator[tuple[Path, _Dialect]]:
    """Find the folders of this process's control groups, innermost first."""
    mounts = list(_mounts(root))
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            dialect = _V2
        elif "memory" in controllers.split(","):
            dialect = _V1
        else:
            continue
        for mount in mounts:
            if mount.dialect is dialect:
                top = root / mount.point.relative_to("/")
                yield from ((folder, dialect) for folder in _upwards(top, mount, path))


def _upwards(top: Path, mount: _Mount, path: str) -> Iterator[Path]:
    group = PurePosixPath(path)
    if ".." in group.parts or not group.is_relative_to(mount.root):
        # Seen from inside a container, a group outside of what is mounted: the mount point
        # is then the nearest that can be read.
        yield top
        return
    below = group.relative_to(mount.root)
    yield from (top / parent for parent in (below, *below.parents))


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        place, kind = before.split(), after.split()
        if len(place) < 5 or len(kind) < 3 or not place[4].startswith("/"):
            continue
        where = PurePosixPath(_unescape(place[3])), PurePosixPath(_unescape(place[4]))
        if kind[0] == "cgroup2":
            yield _Mount(*where, _V2)
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield _Mount(*where, _V1)


def _unescape(path: str) -> str:
    r"""Undo the kernel's ``\040`` for a space and its like."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _used_bytes(folder: Path, dialect: _Dialect) -> int:
    """Count what a group uses and could not give back at once."""
    usage = _read_int(folder / dialect.usage) or 0
    statistics = dict(
        line.split(maxsplit=1)
        for line in _read(folder / "memory.stat").splitlines()
        if len(line.split()) == 2
    )
    cached = (statistics.get(key, "0") for key in dialect.page_cache)
    return usage - sum(int(size) for size in cached if size.isdecimal())


def _read_int(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
