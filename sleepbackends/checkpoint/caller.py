"""Has requests carried out: by the helper, by another one where that fails, or in this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from sleepbackends.checkpoint.client import ANSWER_TIMEOUT_S, HelperClient, deadline_s
from sleepbackends.checkpoint.device_memory import DeviceMonitor
from sleepbackends.checkpoint.driver import CheckpointDriver
from sleepbackends.checkpoint.failures import describe, error_of
from sleepbackends.checkpoint.messages import Reply, Request
from sleepbackends.checkpoint.operations import Operations
from sleepbackends.checkpoint.options import CheckpointOptions
from sleepbackends.checkpoint.runtime import RuntimeDirectory
from sleepbackends.checkpoint.states import ProcessState
from sleepbackends.checkpoint.targets import Target
from sleepbackends.errors import BackendUnavailableError, HelperError

logger = logging.getLogger(__name__)

_LEAVING_S = 5.0
"""How long a process that ends waits for others on its devices."""

Notice = Callable[[Mapping[int, ProcessState]], None]


class Caller:
    """Carries requests out on behalf of this process.

    Parameters
    ----------
    owner : Target
        This process.
    directory : RuntimeDirectory
        Where its socket, journal and locks are.
    driver : CheckpointDriver
        For what is done in this process.
    options : CheckpointOptions
        Whether there is a helper, and what it does when this process ends.
    """

    def __init__(
        self,
        owner: Target,
        directory: RuntimeDirectory,
        driver: CheckpointDriver,
        options: CheckpointOptions,
    ) -> None:
        self._owner = owner
        self._here = Operations(owner, directory, driver)
        self._client = HelperClient(owner, directory.path, options.on_owner_exit)
        self._helped = options.helper
        self._waking: tuple[Request, int] | None = None

    @property
    def helper_pid(self) -> int | None:
        """The process number of the helper, if one was started."""
        return self._client.pid

    def start(self) -> None:
        """Start the helper, if there is to be one, without waiting for it.

        Raises
        ------
        BackendUnavailableError
            If no process can be started.
        """
        if self._helped:
            self._client.start()

    def stop(self) -> None:
        """End the helper; the next request starts another."""
        self._client.stop()

    def leave(self) -> None:
        """Wake what is asleep, if it can be woken, and end the helper; never raises.

        A process that ends while it is asleep may hang in the libraries that clean up then.
        """
        if os.getpid() != self._owner.pid:
            return  # a fork of it ends, and what sleeps is none of its business
        try:
            if self._waking is not None:
                request, size_bytes = self._waking
                reply = self.change(request, size_bytes, lambda _: None)
                if not reply.ok:
                    raise error_of("resume", reply)
        except Exception:
            logger.exception("what is asleep stays so: sleepbackends resume --pid PID")
        finally:
            self._waking = None
            self._client.stop()

    def devices(self) -> list[str]:
        """List the UUIDs of all devices of this machine.

        Raises
        ------
        BackendUnavailableError
            If the management library cannot be used.
        """
        return DeviceMonitor().devices

    def ask(self, request: Request) -> Reply:
        """Ask something that changes nothing: a helper, another one, or the driver from here."""
        for _ in range(2 if self._helped else 0):
            try:
                return self._client.call(request, ANSWER_TIMEOUT_S)
            except HelperError:
                continue
            except BackendUnavailableError:
                break
        return self._here.answer(request)

    def change(self, request: Request, size_bytes: int, notice: Notice) -> Reply:
        """Suspend or resume; see ``_change`` for what a failing helper leads to.

        Raises
        ------
        HelperError, ProcessLostError
            As ``_change``.
        BackendUnavailableError
            No helper can work here; nothing was done.
        """
        waking = request.model_copy(update={"op": "resume", "wait_s": _LEAVING_S}), size_bytes
        try:
            reply = self._change(request, size_bytes, notice)
        except BaseException:
            self._waking = waking  # as far as is known
            raise
        if reply.states:  # else it was refused, and all is as before
            self._waking = waking if any(s.is_asleep for s in reply.states.values()) else None
        return reply

    def _change(self, request: Request, size_bytes: int, notice: Notice) -> Reply:
        """Suspend or resume.

        A helper that dies or hangs in a suspend leaves everything running, in a resume the next
        one goes on with it: both by the states that it finds.

        Parameters
        ----------
        request : Request
            What to do.
        size_bytes : int
            What the processes hold, for the deadline.
        notice : callable
            Told the states that were found after a failure.

        Raises
        ------
        HelperError
            The helper failed. After a suspend everything runs; after a resume ``states`` says
            what is so, and the call can be repeated.
        ProcessLostError
            It failed and what it did cannot be undone.
        """
        if not self._helped:
            return self._here.answer(request)
        timeout_s = deadline_s(request, size_bytes)
        try:
            return self._client.call(request, timeout_s)
        except HelperError as error:
            return self._recover(request, timeout_s, notice, error)
        except BackendUnavailableError:
            if request.op == "resume":  # from here, rather than not at all
                return self._here.answer(request)
            raise

    def _recover(
        self, request: Request, timeout_s: float, notice: Notice, error: HelperError
    ) -> Reply:
        states = self._states(request)
        notice(states)
        error.states = {pid: state.value for pid, state in states.items()}
        if set(states.values()) == {ProcessState.RUNNING}:
            if request.op == "suspend":
                raise error
            return Reply(id=request.id, ok=True, states=dict(states))
        if not all(state.can_be_woken for state in states.values()):
            lost = Reply(id=0, ok=False, kind="failed", step=request.op, states=dict(states))
            raise error_of(request.op, lost) from error
        waking = request.model_copy(update={"op": "resume"})
        try:
            reply = self._client.call(waking, timeout_s)
        except HelperError as second:
            states = self._states(request)
            notice(states)
            second.states = {pid: state.value for pid, state in states.items()}
            raise second from error
        except BackendUnavailableError:
            reply = self._here.answer(waking)
        notice(reply.states)
        if request.op == "resume":
            return reply
        if not reply.ok:
            raise error_of("resume", reply) from error
        error.states = {pid: state.value for pid, state in reply.states.items()}
        error.hint = f"it was undone ({describe(reply.states)}); the call can be repeated"
        raise error

    def _states(self, request: Request) -> dict[int, ProcessState]:
        return dict(self.ask(request.model_copy(update={"op": "state"})).states)
