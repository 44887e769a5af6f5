"""The processes to checkpoint: which they are, and why one must be left alone.

What is refused here would hang the driver's calls or lose the process. Nothing is touched: all
of it is read from ``/proc``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sleepbackends.errors import CheckpointRefusedError

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
DEVICES = "/dev/nvidia"


@dataclass(frozen=True)
class Target:
    """A process, told apart from a later one of the same number by when it started.

    Parameters
    ----------
    pid : int
        Its number.
    started : int
        When it started, in clock ticks since the machine did.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Target:
        """Find a living process.

        Raises
        ------
        CheckpointRefusedError
            If there is none, or the number is a thread's.
        """
        status = _status(pid)
        group = status.get("Tgid", "")
        if not group:
            raise _refused(pid, "there is no such process", "see whether it has ended")
        if group != str(pid):
            # The driver takes a thread's number and does harm (NVIDIA/cuda-checkpoint issue 41).
            raise _refused(pid, f"it is a thread of process {group}", f"name process {group}")
        return cls(pid, _started(pid))

    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return bool(self.started) and _started(self.pid) == self.started


def check(target: Target) -> None:
    """Check that a process can be checkpointed, as far as can be seen from outside.

    Raises
    ------
    CheckpointRefusedError
        If it has ended, belongs to another user, is stopped, or has children that share its
        devices.
    """
    if not target.is_alive():
        raise _refused(target.pid, "it has ended", "start it again")
    status = _status(target.pid)
    state = status.get("State", "?")[:1]
    if state in "Tt":
        # The driver's thread in the target does the work, and would never run.
        raise _refused(target.pid, "it is stopped or being traced", "let it go on (SIGCONT)")
    if _is_frozen(target.pid):
        raise _refused(target.pid, "its control group is frozen", "thaw it")
    try:
        # What the driver opens of its target.
        os.listdir(PROC / str(target.pid) / "fd")
    except OSError as error:
        owner = status.get("Uid", "?").split()[0]
        raise _refused(
            target.pid,
            f"this user ({os.getuid()}) may not look into it, which belongs to user {owner}: "
            f"{error.strerror}",
            "run as the same user, or with CAP_SYS_PTRACE; a process that is not dumpable "
            "needs the latter",
        ) from error
    for child in _children(target.pid):
        if _is_unexeced(target.pid, child) and _holds_devices(child):
            raise _refused(
                target.pid,
                f"its child {child} was forked, runs no program of its own, and holds its devices",
                "start children with spawn or forkserver instead of fork",
            )


def _is_frozen(pid: int) -> bool:
    groups = _read(PROC / str(pid) / "cgroup").splitlines()
    folders = (GROUPS / line.rpartition(":")[2].lstrip("/") for line in groups)
    return any("frozen 1" in _read(folder / "cgroup.events") for folder in folders)


def _refused(pid: int, why: str, hint: str) -> CheckpointRefusedError:
    return CheckpointRefusedError(f"process {pid} cannot be checkpointed: {why}", hint=hint)


def _status(pid: int) -> dict[str, str]:
    pairs = (line.partition(":") for line in _read(PROC / str(pid) / "status").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _started(pid: int) -> int:
    """Return when a process started; 0 if it has ended, waited for or not."""
    fields = _read(PROC / str(pid) / "stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else 0


def _children(pid: int) -> Iterator[int]:
    for thread in _listed(PROC / str(pid) / "task"):
        for child in _read(PROC / str(pid) / "task" / thread / "children").split():
            yield int(child)
            yield from _children(int(child))


def _is_unexeced(parent: int, child: int) -> bool:
    # The kernel gives every program it starts other random bytes, at an address in there.
    ours = _read_bytes(PROC / str(parent) / "auxv")
    return bool(ours) and ours == _read_bytes(PROC / str(child) / "auxv")


def _holds_devices(pid: int) -> bool:
    folder = PROC / str(pid) / "fd"
    for name in _listed(folder):
        try:
            if os.readlink(folder / name).startswith(DEVICES):
                return True
        except OSError:
            continue  # closed meanwhile
    return False


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: Path) -> str:
    return _read_bytes(path).decode(errors="replace")


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
