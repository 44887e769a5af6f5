"""Files of this user's processes that sleep: sockets, a lock for each device, and a journal.

The journal says what was meant to happen to which processes; what did happen is asked of the
driver. So whoever finds a process asleep can wake it, whatever became of who put it to sleep.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from platformdirs import user_runtime_path

from sleepbackends.checkpoint.targets import Target
from sleepbackends.errors import BusyError, StorageError

_POLL_S = 0.01
_PATH_BYTES = 90
"""A socket's path has room for 107, with a name in the directory."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Entry:
    """What was meant to happen to some processes.

    Parameters
    ----------
    operation : str
        ``"suspend"`` or ``"resume"`` while it goes on, ``"asleep"`` in between.
    targets : tuple of Target
        The processes.
    device_bytes : dict of str to int
        What they need on each device, by UUID, to be restored.
    owner : Target
        Who wanted it.
    free_bytes : dict of str to int
        What was free on each device before.
    boot : str
        The start of the machine in which the numbers of the processes mean something.
    """

    operation: str
    targets: tuple[Target, ...]
    device_bytes: dict[str, int]
    owner: Target
    free_bytes: dict[str, int] = field(default_factory=dict)
    boot: str = field(default_factory=lambda: _boot())

    @property
    def is_current(self) -> bool:
        """Whether any of the processes still lives."""
        return self.boot == _boot() and any(target.is_alive() for target in self.targets)


class RuntimeDirectory:
    """The directory with these files, for its user alone.

    Parameters
    ----------
    path : Path, optional
        Where it is; made if it is missing.

    Raises
    ------
    StorageError
        If it cannot be made, or is somebody else's.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or user_runtime_path("sleepbackends", appauthor=False)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.stat()
        except OSError as error:
            raise StorageError(
                f"the runtime directory {os.fspath(self.path)!r} cannot be used: {error.strerror}",
                hint="set runtime_directory, or XDG_RUNTIME_DIR",
            ) from error
        if len(os.fsencode(self.path)) > _PATH_BYTES:
            raise StorageError(
                f"the path of the runtime directory {os.fspath(self.path)!r} is too long for a "
                "socket in it",
                hint="set runtime_directory to a shorter one",
            )
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise StorageError(
                f"the runtime directory {os.fspath(self.path)!r} is open to other users",
                hint=f"own it and chmod 700 {os.fspath(self.path)}, or set runtime_directory",
            )

    def socket_of(self, pid: int) -> Path:
        """Return where the helper of a process listens."""
        return self.path / f"{pid}.sock"

    def write(self, entry: Entry) -> None:
        """Write an entry down, for the owner's number; all of it or nothing.

        Raises
        ------
        StorageError
            If it cannot be written; the entry before is still there.
        """
        scratch = self.path / f"{entry.owner.pid}.{os.getpid()}.new"
        try:
            scratch.write_text(json.dumps(asdict(entry)))
            scratch.replace(self.path / f"{entry.owner.pid}.json")
        except OSError as error:
            raise StorageError(
                f"the journal in {os.fspath(self.path)!r} cannot be written: {error.strerror}",
                hint="make room there; without it a process might not be found again",
            ) from error

    def erase(self, owner: int) -> None:
        """Forget what was written for an owner."""
        (self.path / f"{owner}.json").unlink(missing_ok=True)

    def entry_of(self, owner: int) -> Entry | None:
        """Return what was written for an owner, unless it is of another time."""
        entry = self._read(self.path / f"{owner}.json")
        return entry if entry is not None and entry.is_current else None

    def find(self, pid: int) -> Entry | None:
        """Find the entry that a process belongs to, and forget those that are of another time."""
        found = None
        for path in sorted(self.path.glob("*.json")):
            entry = self._read(path)
            if entry is None or not entry.is_current:
                path.unlink(missing_ok=True)
            elif any(target.pid == pid and target.is_alive() for target in entry.targets):
                found = entry
        return found

    @contextmanager
    def devices_held(self, devices: Collection[str], timeout_s: float) -> Iterator[None]:
        """Keep other processes of this user from suspending or resuming on these devices.

        Two that restore on one device at a time could each take what the other needs.

        Raises
        ------
        BusyError
            If one of them is still held when the time is over.
        """
        give_up = time.monotonic() + timeout_s
        with ExitStack() as held:
            # In one order everywhere, so that two never wait for each other.
            for device in sorted(devices):
                held.enter_context(self._held(device, give_up))
            yield

    @contextmanager
    def _held(self, device: str, give_up: float) -> Iterator[None]:
        path = self.path / f"{device}.lock"
        with path.open("a+") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= give_up:
                        lock.seek(0)
                        holder = lock.read().strip() or "another process"
                        raise BusyError(
                            f"{device} is in use by {holder}, which suspends or resumes",
                            hint="try again when it has finished, or allow more time (timeout_s)",
                            holders=[holder],
                        ) from None
                    time.sleep(_POLL_S)
            lock.truncate(0)
            lock.write(f"process {os.getpid()}")
            lock.flush()
            yield

    @staticmethod
    def _read(path: Path) -> Entry | None:
        try:
            found = json.loads(path.read_text())
            targets = tuple(Target(**target) for target in found.pop("targets"))
            return Entry(targets=targets, owner=Target(**found.pop("owner")), **found)
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            return None  # half-written by nobody: from another release, or garbage


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
