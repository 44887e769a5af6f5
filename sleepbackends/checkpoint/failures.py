"""What a reply means: the only map from replies to errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sleepbackends.checkpoint.messages import Reply
from sleepbackends.checkpoint.states import ProcessState
from sleepbackends.errors import (
    BackendUnavailableError,
    BusyError,
    CheckpointError,
    CheckpointRefusedError,
    DeviceMemoryError,
    LockTimeoutError,
    ProcessLostError,
    SleepBackendsError,
)

CAUSES: Mapping[str, str] = {
    "NOT_SUPPORTED": "the process uses something that cannot be checkpointed: managed memory, "
    "memory shared with another process, a live communicator, MPS, or a driver before 575.57",
    "OUT_OF_MEMORY": "host memory ran out, or the device is split into instances (MIG)",
    "OPERATING_SYSTEM": "the driver may not look into the process, or a restore of it ran out of "
    "memory before",
    "NOT_PERMITTED": "this user may not, or persistence mode is off and nobody holds the driver",
    "NOT_INITIALIZED": "the process has no CUDA context",
    "ILLEGAL_STATE": "somebody else suspends or resumes the process",
    "NOT_READY": "work that was submitted to the device did not end in time",
    "INVALID_VALUE": "the map of devices does not fit",
}
"""What the driver's answers have been seen to mean."""


def error_of(operation: str, reply: Reply) -> SleepBackendsError:
    """Make the error that a reply stands for, which did not succeed."""
    if reply.kind == "refused":
        return CheckpointRefusedError(reply.error, hint=reply.hint)
    if reply.kind == "busy":
        return BusyError(reply.error, hint=reply.hint, holders=reply.holders)
    if reply.kind == "no_room":
        return DeviceMemoryError(
            reply.error,
            hint=reply.hint,
            needed_bytes=reply.needed_bytes,
            available_bytes=reply.available_bytes,
        )
    if reply.kind == "unusable":
        return BackendUnavailableError(reply.error, hint=reply.hint, recoverable=True)
    if reply.kind == "garbage":
        return CheckpointError(reply.error, hint="see that all is of one release")
    return _failed(operation, reply)


def describe(states: Mapping[int, ProcessState]) -> str:
    """Write states down, process by process."""
    return ", ".join(f"{pid} is {state.value}" for pid, state in sorted(states.items()))


def _failed(operation: str, reply: Reply) -> SleepBackendsError:
    found = set(reply.states.values())
    message = _tell(operation, reply)
    if reply.step == "state" and operation == "suspend":
        if not all(state.can_be_woken for state in found):
            return CheckpointRefusedError(message, hint=_unready(found))
        return BusyError(message, hint="resume them first", holders=["another suspend"])
    known: dict[str, Any] = {
        "step": reply.step,
        "answers": reply.answers,
        "states": {pid: state.value for pid, state in reply.states.items()},
    }
    # One that is still checkpointed where it was to be restored stays so, however often it is
    # tried (NVIDIA/cuda-checkpoint issue 44).
    wedged = ProcessState.CHECKPOINTED in found and (operation == "suspend" or reply.answers)
    if wedged or not all(state.can_be_woken for state in found):
        return ProcessLostError(
            message,
            hint="end the lost processes and start them again; 'sleepbackends resume --pid PID "
            "--force' wakes those that can be woken",
            **known,
        )
    if ProcessState.LOCKED in found:
        return CheckpointError(message, hint="nothing is lost: resume() again", **known)
    if set(reply.answers.values()) == {"NOT_READY"}:
        return LockTimeoutError(
            message,
            hint="have the work end first, or allow more time (lock_timeout_s, timeout_s)",
            **known,
        )
    return CheckpointError(message, hint="everything runs on", **known)


def _tell(operation: str, reply: Reply) -> str:
    said = [f"{operation}: {reply.step} failed"] if reply.answers else [f"{operation} cannot go on"]
    said += _tell_answers(reply.answers)
    if reply.undo:
        said += ["undoing it failed", *_tell_answers(reply.undo)]
    if reply.states:
        said.append(f"process {describe(reply.states)}")
    return "; ".join([*said, reply.error] if reply.error else said)


def _tell_answers(answers: Mapping[int, str]) -> list[str]:
    return [
        f"process {pid}: {answer}" + (f" ({CAUSES[answer]})" if answer in CAUSES else "")
        for pid, answer in sorted(answers.items())
    ]


def _unready(found: set[ProcessState]) -> str:
    if ProcessState.WITHOUT_CUDA in found:
        return "name processes that have a CUDA context"
    if ProcessState.GONE in found:
        return "start the process again"
    return "see what the driver says of them: sleepbackends doctor"
