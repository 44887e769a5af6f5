"""One rank's part in one transition: where it stops for the others, and how it is undone."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from concurrent.futures import Future
from dataclasses import replace

from sleepbackends.base import BaseBackend
from sleepbackends.control import Control, Stage
from sleepbackends.errors import (
    MechanismError,
    SleepBackendsError,
    TransitionTimeoutError,
    add_note,
)
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.protocol import SleepModeBackend
from sleepbackends.ranks.messages import Answer, Request
from sleepbackends.reports import TransitionReport
from sleepbackends.state import BackendState

SLACK_S = 30.0
"""How much longer than its coordinator a rank waits: it must not give up while it is being
told to go on. What comes first if the coordinator gives up is its order to undo."""


class Participant(Control):
    """Runs a verb in a thread of its own and stops it at every stage.

    Parameters
    ----------
    backend : SleepModeBackend
        Whose verb.
    epoch : int
        The number of the transition.
    request : Request
        Which verb.
    timeout_s : float, optional
        Its deadline, the time spent waiting for others included.
    """

    def __init__(
        self, backend: SleepModeBackend, epoch: int, request: Request, timeout_s: float | None
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self._backend = backend
        self._epoch = epoch
        self._request = request
        self._agreed: set[Stage] = set()
        self._moves_at_once = False
        self._go = threading.Event()
        self._lock = threading.Lock()
        self._asked: Future[Answer] | None = None
        self._last: Answer | None = None

    def begin(self) -> Future[Answer]:
        """Start; the answer comes where it stops first."""
        asked: Future[Answer] = Future()
        self._asked = asked
        # A daemon: a driver that hangs must not keep the process from ending.
        threading.Thread(target=self._run, name="sleepbackends-rank", daemon=True).start()
        return asked

    def proceed(self) -> Future[Answer]:
        """Go on; the answer comes where it stops next."""
        asked = self._next_answer()
        self._go.set()
        return asked

    def abort(self) -> Future[Answer]:
        """Undo; the answer comes when that is done."""
        with self._lock:
            self.cancel()
        asked = self._next_answer()
        self._go.set()
        return asked

    def agree(self, stage: Stage) -> None:
        """Stop until the coordinator says how to go on.

        Raises
        ------
        TransitionTimeoutError, TransitionCancelledError
            It did not, or the others failed.
        """
        if stage in self._agreed or self._moves_at_once:
            return
        self._tell(stage)
        remaining_s = self.remaining_s()
        if not self._go.wait(None if remaining_s is None else remaining_s + SLACK_S):
            raise TransitionTimeoutError(
                f"{self._request.operation} waited in vain for the other ranks within "
                f"{self.timeout_s} s",
                hint="find out which rank is late; the same call can be made again",
            )
        self._go.clear()
        self._check_cancelled(f"{self._request.operation} on this rank")
        self._agreed.add(stage)
        if stage is Stage.UNDOABLE:
            self.commit()

    def _next_answer(self) -> Future[Answer]:
        with self._lock:
            if self._last is not None:
                return answered(self._last)
            if self._asked is None:
                self._asked = Future()
            return self._asked

    def _tell(self, stage: Stage) -> None:
        answer = describe(
            self._backend, self._epoch, stage=stage, total_bytes=self.progress.total_bytes
        )
        with self._lock:
            # Under the lock: whoever aborts after this finds nobody asked, and asks anew.
            self.check(f"{self._request.operation} on this rank")
            asked, self._asked = self._asked, None
        if asked is not None:
            asked.set_result(answer)

    def _run(self) -> None:
        report, error = None, None
        try:
            report = self._take_part()
        except SleepBackendsError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 - the coordinator is told, whatever it is
            error = MechanismError(f"{self._request.operation} failed: {raised!r}")
        answer = describe(self._backend, self._epoch, report=report, error=error)
        with self._lock:
            self._last = answer
            asked, self._asked = self._asked, None
        if asked is not None:
            asked.set_result(answer)

    def _take_part(self) -> TransitionReport | None:
        if isinstance(self._backend, BaseBackend) and self._request.operation != "mark_valid":
            return self._request.run(self._backend, self)
        # This backend stops nowhere by itself: ask before it, and undo what it did after it.
        self._request.check(self._backend)
        self.agree(Stage.CHECKED)
        before = self._backend.state()
        self._moves_at_once = True  # a part of it may stop by itself, before the rest has begun
        report = self._request.run(self._backend, self)
        self._moves_at_once = False
        try:
            self.agree(Stage.UNDOABLE)
        except SleepBackendsError as error:
            self._undo(before, error)
            raise
        return report

    def _undo(self, before: BackendState, error: SleepBackendsError) -> None:
        """Bring back what was suspended, or suspend what was resumed. A discard stays."""
        try:
            if self._request.operation == "suspend":
                self._backend.resume()
            elif self._request.operation == "resume":
                self._backend.suspend(1, policies=_as_it_was(before))
        except SleepBackendsError as second:
            add_note(error, f"could not be undone: {second!r}")


def _as_it_was(before: BackendState) -> Policies:
    policies = {
        name: Policy.OFFLOAD
        if tag.offloaded_bytes
        else Policy.DISCARD
        if tag.discarded_bytes
        else Policy.KEEP
        for name, tag in before.tags.items()
    }
    return Policies({name: TagPolicy(policy, policy) for name, policy in policies.items()})


def describe(
    backend: SleepModeBackend,
    epoch: int,
    *,
    stage: Stage | None = None,
    total_bytes: int = 0,
    report: TransitionReport | None = None,
    error: SleepBackendsError | None = None,
) -> Answer:
    """Make an answer of what is so now."""
    state = backend.state()
    return Answer(
        who=f"process {os.getpid()} on {socket.gethostname()}",
        capabilities=backend.capabilities,
        epoch=epoch,
        # A plain dict: what a ledger hands out cannot be pickled.
        state=replace(state, tags=dict(state.tags), ranks={}),
        stage=stage,
        total_bytes=total_bytes,
        report=report,
        error=error,
    )


def answered(answer: Answer) -> Future[Answer]:
    """Return a future that has ended."""
    future: Future[Answer] = Future()
    future.set_result(answer)
    return future


def portable(answer: Answer) -> Answer:
    """Return the answer with an error that can be sent, if its own cannot."""
    return answer if answer.error is None else replace(answer, error=portable_error(answer.error))


def portable_error(error: SleepBackendsError) -> SleepBackendsError:
    """Return the error, or one that says the same, if others' code made it impossible to send."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - what was just pickled
    except Exception:  # noqa: BLE001 - errors of others may fail in any way
        return MechanismError(f"{type(error).__name__}: {error}")
    return error
