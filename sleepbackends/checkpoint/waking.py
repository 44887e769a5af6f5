"""Wake a process from another one: through its helper, or in its place."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from sleepbackends.checkpoint.client import ANSWER_TIMEOUT_S, deadline_s
from sleepbackends.checkpoint.failures import error_of
from sleepbackends.checkpoint.messages import LINE_BYTES, Process, Reply, Request
from sleepbackends.checkpoint.operations import Operations
from sleepbackends.checkpoint.runtime import Entry, RuntimeDirectory
from sleepbackends.checkpoint.states import ProcessState
from sleepbackends.checkpoint.targets import Target, check
from sleepbackends.errors import CheckpointError

MARGIN_BYTES = 256 << 20
"""As the backend's ``device_margin_bytes``."""

_WAIT_S = 30.0


@dataclass(frozen=True)
class Woken:
    """What became of the processes.

    Parameters
    ----------
    changed : bool
        Whether any of them slept.
    by : str
        Who woke them.
    states : mapping of int to ProcessState
        Where they are now.
    """

    changed: bool
    by: str
    states: Mapping[int, ProcessState]


def wake(pid: int, directory: Path | None = None, *, force: bool = False) -> Woken:
    """Wake a process, and those that were put to sleep with it.

    Its helper is asked; where there is none any more, this process does it.

    Parameters
    ----------
    pid : int
        The process.
    directory : Path, optional
        The runtime directory of its backend.
    force : bool
        Wake what can be woken although some are lost, or what they need is not known.

    Raises
    ------
    CheckpointRefusedError
        If there is no such process, or it cannot be looked into.
    DeviceMemoryError, BusyError
        If there is not enough room, or another process is at it; all are still asleep.
    ProcessLostError
        If one cannot be woken.
    BackendUnavailableError
        If the driver cannot be used here.
    """
    target = Target.of(pid)
    check(target)
    runtime = RuntimeDirectory(directory)
    entry = runtime.find(pid)
    owner = entry.owner if entry is not None else target
    request = Request(
        id=1,
        op="resume",
        targets=_processes(entry, target),
        wait_s=_WAIT_S,
        margin_bytes=MARGIN_BYTES,
        force=force,
    )
    reply = _ask_helper(runtime.socket_of(owner.pid), request, entry)
    by = "its helper"
    if reply is None:
        itself = pid == os.getpid()  # which waits for ever where it asks for itself
        here = Operations(owner, runtime) if itself else Operations.elsewhere(owner, runtime.path)
        reply = here.answer(request)
        by = "this process"
    if not reply.ok:
        raise error_of("resume", reply)
    return Woken(reply.changed, by, reply.states)


def _processes(entry: Entry | None, target: Target) -> tuple[Process, ...]:
    targets = entry.targets if entry is not None else (target,)
    return tuple(Process(pid=t.pid, started=t.started) for t in targets)


def _ask_helper(path: Path, request: Request, entry: Entry | None) -> Reply | None:
    """Ask the helper that listens there; None if there is none.

    Raises
    ------
    CheckpointError
        If it does not answer in time, so that what it does is not known.
    """
    size_bytes = sum(entry.device_bytes.values()) if entry is not None else 0
    give_up = time.monotonic() + deadline_s(request, size_bytes)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
        connected.settimeout(ANSWER_TIMEOUT_S)
        try:
            connected.connect(os.fspath(path))
            connected.sendall(request.model_dump_json().encode() + b"\n")
        except OSError:
            return None
        received = b""
        while not received.endswith(b"\n"):
            connected.settimeout(max(0.001, give_up - time.monotonic()))
            try:
                part = connected.recv(LINE_BYTES)
            except TimeoutError:
                raise CheckpointError(
                    "the helper of the process does not answer",
                    hint="end it (the journal and the states stay), and ask again",
                ) from None
            except OSError:
                return None
            if not part:
                return None  # it died over it: the states tell how far it came
            received += part
    try:
        return Reply.model_validate_json(received)
    except ValidationError as error:
        raise CheckpointError(
            f"the helper of the process answered with garbage: {error}",
            hint="see that all is of one release",
        ) from error
