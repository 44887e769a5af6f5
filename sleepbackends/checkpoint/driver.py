"""The CUDA driver's six checkpoint calls, through ``cuda.bindings.driver``.

Nothing else in this package calls the driver. An answer is the name of the ``CUresult`` without
``CUDA_ERROR_``, and nothing for success. Arguments that only reserve room are left out: their
names differ between releases of the bindings.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Sequence
from typing import Any

from sleepbackends.availability import Availability
from sleepbackends.checkpoint.states import BY_NUMBER, ProcessState
from sleepbackends.cuda_bindings import bindings_problem
from sleepbackends.errors import BackendUnavailableError

LIBRARY = "libcuda.so.1"

CALLS = ("Lock", "Checkpoint", "Restore", "Unlock", "GetState", "GetRestoreThreadId")
_CALL = "cuCheckpointProcess"

Pairs = Sequence[tuple[str, str]]
"""UUIDs of devices as the driver's management library writes them: from which to which."""


def driver_problem() -> Availability | None:
    """Say why processes cannot be checkpointed here; None if the driver has what it takes.

    Looks for names only: the driver is not initialised.
    """
    problem = bindings_problem()
    if problem is not None:
        return problem
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return Availability(False, f"cuda-bindings cannot be imported: {error}")
    holes = [name for name in CALLS if not hasattr(driver, _CALL + name)]
    if holes or not hasattr(driver, "CUcheckpointRestoreArgs"):
        lacking = ", ".join(_CALL + name for name in holes) or "CUcheckpointRestoreArgs"
        return Availability(
            False,
            f"this release of cuda-bindings lacks {lacking}: it might checkpoint a process and "
            "not restore it",
            "install cuda-bindings 12.9.1 and newer, or 13.0.2 and newer but not 13.3.0",
        )
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        return Availability(
            False,
            f"the CUDA driver cannot be loaded: {error}",
            "install the NVIDIA driver, or give the container its devices (--gpus all)",
        )
    if missing := [name for name in CALLS if not hasattr(library, _CALL + name)]:
        return Availability(
            False,
            f"this NVIDIA driver has no {', '.join(_CALL + name for name in missing)}",
            "update it: the calls exist from 570 on, and 575.57 and newer are advised",
        )
    return None


class CheckpointDriver:
    """The calls, for any process; made from a process that needs no context of its own.

    Raises
    ------
    BackendUnavailableError
        If the bindings or the driver do not have them all.
    """

    def __init__(self) -> None:
        problem = driver_problem()
        if problem is not None:
            raise BackendUnavailableError(problem.reason, hint=problem.hint)
        from cuda.bindings import driver

        self._cu: Any = driver

    def initialise(self) -> str:
        """Initialise the driver, which restores need; returns the answer."""
        return self._answer(self._cu.cuInit(0))

    def lock(self, pid: int, timeout_s: float) -> str:
        """Have the calls of a process wait, once the work it has submitted has ended.

        ``NOT_READY`` is the answer where that takes too long; the process runs on then.
        """
        args = self._cu.CUcheckpointLockArgs()
        args.timeoutMs = max(1, round(timeout_s * 1000))  # 0 would wait for ever
        return self._answer(self._cu.cuCheckpointProcessLock(pid, args))

    def checkpoint(self, pid: int) -> str:
        """Move what a locked process holds on devices to host memory, and release them."""
        return self._answer(self._cu.cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, pid: int, pairs: Pairs = ()) -> str:
        """Take the devices again for a process, which is locked afterwards.

        One that ran out of device memory must not be tried again: every later one fails, too
        (NVIDIA/cuda-checkpoint issue 44).
        """
        return self._answer(self._cu.cuCheckpointProcessRestore(pid, self._restore_args(pairs)))

    def unlock(self, pid: int) -> str:
        """Let the calls of a locked process go on."""
        return self._answer(self._cu.cuCheckpointProcessUnlock(pid, None))

    def state(self, pid: int) -> ProcessState:
        """Ask for the state of a process."""
        try:
            result, *values = self._cu.cuCheckpointProcessGetState(pid)
        except ValueError as error:
            # Bindings older than 13.4.1 have no names for the states of custom storage.
            first = str(error).split()[0]
            return _state(int(first) if first.isdecimal() else -1)
        answer = self._answer((result,))
        if answer == "NOT_INITIALIZED":
            return ProcessState.WITHOUT_CUDA
        return ProcessState.SILENT if answer else _state(int(values[0]))

    def devices_in_use(self) -> list[str]:
        """Return the UUIDs of the devices on which this process has a primary context.

        Waits while this process is locked.
        """
        answer, count = self._ask(self._cu.cuDeviceGetCount)
        if answer:
            return []
        found = []
        for number in range(count):
            answer, active = self._ask(self._cu.cuDevicePrimaryCtxGetState, number)
            if not answer and active[1]:
                answer, name = self._ask(self._cu.cuDeviceGetUuid, number)
                found.append(f"GPU-{uuid.UUID(bytes=bytes(name.bytes)[:16])}")
        return found

    def _restore_args(self, pairs: Pairs) -> Any:
        if not pairs:
            return None
        # A CUuuid is read where its bytes are, so they have to stay until the call has returned.
        self._keep = [ctypes.create_string_buffer(_bytes_of(u), 16) for p in pairs for u in p]
        args, made = self._cu.CUcheckpointRestoreArgs(), []
        for old, new in zip(self._keep[::2], self._keep[1::2], strict=True):
            pair = self._cu.CUcheckpointGpuPair()
            pair.oldUuid = self._cu.CUuuid(ctypes.addressof(old))
            pair.newUuid = self._cu.CUuuid(ctypes.addressof(new))
            made.append(pair)
        args.gpuPairs, args.gpuPairsCount = made, len(made)
        return args

    def _ask(self, function: Any, *arguments: Any) -> tuple[str, Any]:
        result, *values = function(*arguments)
        return self._answer((result,)), values[0] if len(values) == 1 else values

    def _answer(self, results: Sequence[Any]) -> str:
        result = results[0]
        if not int(result):
            return ""
        name = str(getattr(result, "name", f"error {int(result)}"))
        return name.removeprefix("CUDA_ERROR_")


def _state(number: int) -> ProcessState:
    return BY_NUMBER[number] if 0 <= number < len(BY_NUMBER) else ProcessState.SILENT


def _bytes_of(device: str) -> bytes:
    return uuid.UUID(device.removeprefix("GPU-")).bytes
