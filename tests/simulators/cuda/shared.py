"""Device memory that several processes share, and that a test can take from them."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from tests.simulators.cuda.reports import MAX_DEVICES

# struct pool of pool.c: magic, a budget for each device, and a slot for each process.
_MAGIC = b"SBSIM\0\0\x02"
_UNLIMITED = 2**64 - 1
_WORD = struct.Struct("<Q")
_FLAGS_AT = 2 + 2 * MAX_DEVICES
_HAS_CONTEXT, _STATE, _LOCKING, _WEDGED, _BUSY, _MIGRATIONS = range(_FLAGS_AT, _FLAGS_AT + 6)
_CHECKPOINTED = 2
_STEPS = ("lock", "checkpoint", "restore", "unlock", "state")
_STEPS_AT = _FLAGS_AT + 6
_FAULTS_AT = _STEPS_AT + len(_STEPS)
_SLOT_WORDS = _FAULTS_AT + len(_STEPS)
_SLOTS_AT = len(_MAGIC) + MAX_DEVICES * _WORD.size
_MAX_PROCESSES = 64
_SIZE = _SLOTS_AT + _MAX_PROCESSES * _SLOT_WORDS * _WORD.size


class Mishap(IntEnum):
    """What a step of a checkpoint can do besides failing with a ``CUresult``."""

    HANGS = 0x10000
    CALLER_DIES_BEFORE = 0x10001
    CALLER_DIES_AFTER = 0x10002
    TARGET_DIES = 0x10003
    """And the call never returns."""
    TAKES_50_MS = 0x10004


class SharedDevices:
    """The file through which processes with the simulated driver share devices.

    They name it in ``SIMULATED_CUDA_SHARED``. What a process used counts until it ends, in
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

    # Checkpoints of processes

    def register(self, process: int, size_bytes: int, device: int = 0) -> None:
        """Have a process count as one with a context that uses so much of a device.

        It need not have the driver: whatever sleeps can be checkpointed.
        """
        with self._locked():
            at = self._empty_slot()
            words = [process, _start_time(process), *([0] * (_SLOT_WORDS - 2))]
            words[2 + device] = size_bytes
            words[_HAS_CONTEXT] = 1
            self._fill(at, words)

    def forget(self, process: int) -> None:
        """Have a process count as one without a context."""
        with self._locked():
            self._fill(self._slot(process), [0] * _SLOT_WORDS)

    def let_fail(self, process: int, step: str, what: int, times: int | None = 1) -> None:
        """Have a step of checkpointing a process fail, or do worse.

        Parameters
        ----------
        process
            The target.
        step
            ``lock``, ``checkpoint``, ``restore``, ``unlock`` or ``state``.
        what
            A ``CUresult``, of which 999 moves the process to FAILED; or a `Mishap`; or 0 for
            nothing any more.
        times
            How often. None: always.
        """
        count = 0xFFFFFFFF if times is None else times
        self._put(process, _FAULTS_AT + _STEPS.index(step), (count << 32 | what) if what else 0)

    def set_busy(self, process: int, busy: bool) -> None:
        """Have a process work on something that does not end, so that it cannot be locked."""
        self._put(process, _BUSY, int(busy))

    def is_wedged(self, process: int) -> bool:
        """Tell whether a restore ran out of memory, so that none succeeds any more."""
        return bool(self._get(process, _WEDGED))

    def checkpoint_state(self, process: int) -> int:
        """Return the ``CUprocessState`` of a process."""
        return self._get(process, _STATE)

    def put_state(self, process: int, state: int) -> None:
        """Move a process into a state and mend what was wrong with it."""
        with self._locked():
            at = self._slot(process)
            for word in (_LOCKING, _WEDGED, _BUSY, *range(_FAULTS_AT, _SLOT_WORDS)):
                self._write(at + word * _WORD.size, 0)
            for used in range(2, 2 + MAX_DEVICES):
                saved = used + MAX_DEVICES
                both = self._read(at + used * _WORD.size) + self._read(at + saved * _WORD.size)
                gone = state == _CHECKPOINTED
                self._write(at + used * _WORD.size, 0 if gone else both)
                self._write(at + saved * _WORD.size, both if gone else 0)
            self._write(at + _STATE * _WORD.size, state)

    def migrations(self, process: int) -> int:
        """Return how many pairs of devices the last restore was given."""
        return self._get(process, _MIGRATIONS)

    def steps(self, process: int) -> dict[str, int]:
        """Return how often each step was asked for: name to count."""
        return {s: self._get(process, _STEPS_AT + i) for i, s in enumerate(_STEPS)}

    def _slot(self, process: int) -> int:
        return {number: at for at, number in self._living()}[process]

    def _get(self, process: int, word: int) -> int:
        with self._locked():
            return self._read(self._slot(process) + word * _WORD.size)

    def _put(self, process: int, word: int, value: int) -> None:
        with self._locked():
            self._write(self._slot(process) + word * _WORD.size, value)

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
        for at, process in self._living():
            if process == os.getpid():
                return at
        at = self._empty_slot()
        words = [os.getpid(), _start_time(os.getpid()), *([0] * (_SLOT_WORDS - 2))]
        self._fill(at, words)
        return at

    def _fill(self, at: int, words: list[int]) -> None:
        size = _SLOT_WORDS * _WORD.size
        self._memory[at : at + size] = struct.pack(f"<{_SLOT_WORDS}Q", *words)

    def _empty_slot(self) -> int:
        living = dict(self._living())
        for index in range(_MAX_PROCESSES):
            at = _SLOTS_AT + index * _SLOT_WORDS * _WORD.size
            if at not in living:
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
