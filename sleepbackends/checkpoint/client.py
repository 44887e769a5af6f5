"""A helper, seen from the process that started it: requests with deadlines, and replacements.

No request that changes something is ever sent twice because its answer is missing: a new helper
is asked for the states first. They are in the targets, so it can go on from there.
"""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from sleepbackends.checkpoint.messages import Hello, Reply, Request
from sleepbackends.checkpoint.targets import Target
from sleepbackends.errors import BackendUnavailableError, HelperError
from sleepbackends.interpreter import python_command

HELLO_TIMEOUT_S = 60.0
"""A driver without persistence mode takes seconds for each device."""

ANSWER_TIMEOUT_S = 15.0
"""For a request that only asks: more than the driver is waited for."""

SLOWEST_BYTES_S = 5e8
"""A fifth of what was measured for a checkpoint. Killing a helper in the middle of one is the
last resort, so the deadline is generous."""

_STEP_S = 60.0
_ENDING_S = 5.0
_SAID_BYTES = 2000
_MODULE = "sleepbackends.checkpoint.helper"


def deadline_s(request: Request, size_bytes: int) -> float:
    """Return how long a helper may take, so that it is only killed when it hangs.

    Parameters
    ----------
    request : Request
        What it is asked to do.
    size_bytes : int
        What the processes hold on all devices.
    """
    if request.op not in ("suspend", "resume"):
        return ANSWER_TIMEOUT_S
    step_s = _STEP_S + size_bytes / SLOWEST_BYTES_S
    # A suspend may have to be undone, which is a resume.
    steps = request.lock_timeout_s + 2 * step_s if request.op == "suspend" else step_s
    return request.wait_s + steps + ANSWER_TIMEOUT_S


class HelperClient:
    """Starts a helper, talks to it and replaces it.

    Parameters
    ----------
    owner : Target
        This process.
    directory : Path
        Its runtime directory.
    on_exit : str
        What the helper does when the owner ends: ``"keep"`` or ``"resume"``.
    """

    def __init__(self, owner: Target, directory: Path, on_exit: str = "keep") -> None:
        self._arguments = (str(owner.pid), os.fspath(directory), on_exit)
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._greeted = False
        self._received = b""

    @property
    def pid(self) -> int | None:
        """The process number of the helper, if there is one."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start a helper unless one is running, and do not wait until it is ready.

        Raises
        ------
        BackendUnavailableError
            If no process can be started.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the helper lives
        try:
            # Not forked: what a fork inherits of the driver is of no use to it.
            self._process = subprocess.Popen(  # noqa: S603 - runs a module of this package
                python_command(_MODULE, *self._arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                start_new_session=True,
                # A job file makes whoever inherits it one of the job's processes.
                env={k: v for k, v in os.environ.items() if k != "CUDA_CHECKPOINT_JOB_FILE"},
            )
        except OSError as error:
            raise BackendUnavailableError(
                f"the helper cannot be started: {error}",
                hint="see that this process may start others, or do without: helper=False",
            ) from error
        self._greeted, self._received = False, b""

    def call(self, request: Request, timeout_s: float) -> Reply:
        """Send a request and wait for its reply.

        Raises
        ------
        HelperError
            If the helper dies or takes too long, when it is killed; what it was doing is for
            another one to find out.
        BackendUnavailableError
            If it cannot work here; nothing was done.
        """
        self.start()
        self._await_hello()
        line = request.model_dump_json().encode() + b"\n"
        process = self._process
        try:
            if process is None or process.stdin is None:
                raise BrokenPipeError
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            raise self._failed("died", request.op) from None
        try:
            reply = Reply.model_validate_json(self._line(timeout_s, request.op))
        except ValidationError:
            raise self._failed("answered with garbage", request.op) from None
        if reply.id != request.id:
            raise self._failed("answered something else", request.op)
        return reply

    def stop(self) -> None:
        """Have the helper end, at the latest by killing it. Repeating it does nothing."""
        process, self._process = self._process, None
        if process is not None:
            with process:
                if process.stdin is not None:
                    try:
                        end = Request(id=0, op="end")
                        process.stdin.write(end.model_dump_json().encode() + b"\n")
                        process.stdin.close()
                    except OSError:
                        process.kill()
                try:
                    process.wait(_ENDING_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        if self._said is not None:
            self._said.close()
            self._said = None

    def kill(self) -> None:
        """Kill the helper, in whatever it is doing."""
        if self._process is not None:
            self._process.kill()
        self.stop()

    def _await_hello(self) -> None:
        if self._greeted:
            return
        try:
            hello = Hello.model_validate_json(self._line(HELLO_TIMEOUT_S, "starting"))
        except ValidationError:
            raise self._failed("answered with garbage", "starting") from None
        if hello.problem:
            self.stop()
            raise BackendUnavailableError(hello.problem, hint=hello.hint)
        self._greeted = True

    def _line(self, timeout_s: float, doing: str) -> bytes:
        """Read one line, without the GIL: a callback that the driver waits for may need it."""
        process = self._process
        if process is None or process.stdout is None:
            raise self._failed("died", doing)
        give_up = time.monotonic() + timeout_s
        readable = select.poll()
        readable.register(process.stdout, select.POLLIN)
        while b"\n" not in self._received:
            left_s = give_up - time.monotonic()
            if left_s <= 0 or not readable.poll(left_s * 1000):
                raise self._failed(f"did not answer within {timeout_s:g} s", doing)
            received = os.read(process.stdout.fileno(), 1 << 16)
            if not received:
                raise self._failed("died", doing)
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _failed(self, how: str, doing: str) -> HelperError:
        """Kill the helper and say what happened to it."""
        process, said = self._process, ""
        if process is not None:
            process.kill()
            process.wait()
        if self._said is not None:
            size = self._said.seek(0, os.SEEK_END)
            self._said.seek(max(0, size - _SAID_BYTES))
            said = self._said.read().decode(errors="replace").strip()
        code = process.returncode if process is not None else None
        self.stop()
        last = said.splitlines()[-1] if said else ""
        return HelperError(
            f"the helper {how} ({doing}, exit code {code})" + (f": {last}" if last else ""),
            hint="the call can be repeated: another helper is started and asks what is so",
            step=doing,
        )
