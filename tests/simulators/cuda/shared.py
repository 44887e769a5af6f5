"""Device memory that several processes share, and that a test can take from them."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.simulators.cuda.reports import MAX_DEVICES

# struct pool of pool.c: magic, a budget for each device, and a slot for each process.
_MAGIC = b"SBSIM\0\0\x01"
_UNLIMITED = 2**64 - 1
_WORD = struct.Struct("<Q")
_SLOT_WORDS = 2 + MAX_DEVICES
_SLOTS_AT = len(_MAGIC) + MAX_DEVICES * _WORD.size
_MAX_PROCESSES = 64
_SIZE = _SLOTS_AT + _MAX_PROCESSES * _SLOT_WORDS * _WORD.size


class SharedDevices:
    """The file through which processes with the simulated driver share devices.

    They name it in ``SLEEPBACKENDS_SIM_SHARED``. What a process used counts until it ends, in
    whatever way. Any process may move the budget, or take memory without having the driver.

    Parameters
    ----------
    path
        The file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            if os.fstat(self._file).st_size < _SIZE:
                os.ftruncate(self._file, _SIZE)
            self._memory = mmap.mmap(self._file, _SIZE)
            if self._memory[: len(_MAGIC)] != _MAGIC:
                budgets = _WORD.pack(_UNLIMITED) * MAX_DEVICES
                self._memory[:_SLOTS_AT] = _MAGIC + budgets
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def set_budget_bytes(self, budget_bytes: int | None, device: int = 0) -> None:
        """Let so much of a device be in use, by all processes together. None: all of it."""
        with self._locked():
            self._write(
                len(_MAGIC) + device * _WORD.size,
                _UNLIMITED if budget_bytes is None else budget_bytes,
            )

    def used_bytes(self, device: int = 0) -> dict[int, int]:
        """Return what living processes use of a device: process number to bytes."""
        with self._locked():
            return {
                process: self._read(at + (2 + device) * _WORD.size)
                for at, process in self._living()
            }

    def take(self, size_bytes: int, device: int = 0) -> None:
        """Use memory of a device in this process's name; a negative size gives it back.

        Raises
        ------
        RuntimeError
            The file has no room for another process; nothing was taken.
        """
        with self._locked():
            at = self._own_slot() + (2 + device) * _WORD.size
            self._write(at, self._read(at) + size_bytes)

    def close(self) -> None:
        """Let go of the file. What this process took stays taken until it ends."""
        self._memory.close()
        os.close(self._file)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _living(self) -> Iterator[tuple[int, int]]:
        for index in range(_MAX_PROCESSES):
            at = _SLOTS_AT + index * _SLOT_WORDS * _WORD.size
            process, started = self._read(at), self._read(at + _WORD.size)
            if process and _start_time(process) == started:
                yield at, process

    def _own_slot(self) -> int:
        living = dict(self._living())
        for at, process in living.items():
            if process == os.getpid():
                return at
        for index in range(_MAX_PROCESSES):
            at = _SLOTS_AT + index * _SLOT_WORDS * _WORD.size
            if at not in living:
                words = [os.getpid(), _start_time(os.getpid()), *([0] * MAX_DEVICES)]
                self._memory[at : at + _SLOT_WORDS * _WORD.size] = struct.pack(
                    f"<{_SLOT_WORDS}Q", *words
                )
                return at
        msg = f"{self.path}: {_MAX_PROCESSES} processes share these devices already"
        raise RuntimeError(msg)

    def _read(self, at: int) -> int:
        return int(_WORD.unpack_from(self._memory, at)[0])

    def _write(self, at: int, value: int) -> None:
        _WORD.pack_into(self._memory, at, value)


def _start_time(process: int) -> int:
    """Return when a process started, in ticks, or 0 if it has ended, waited for or not."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])
