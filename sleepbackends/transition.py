"""One call to an orchestrator from its turn to its report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sleepbackends.control import Control
from sleepbackends.engine_state import EngineReport
from sleepbackends.errors import ClosedError, HookError, SleepBackendsError
from sleepbackends.lock import TransitionLock
from sleepbackends.observers import Observation, Observers
from sleepbackends.protocol import RemoteBackend, SleepModeBackend
from sleepbackends.reports import TransitionReport, compare
from sleepbackends.service import Service

if TYPE_CHECKING:
    from sleepbackends.plan import Plan
    from sleepbackends.policies import Policy


class Transition:
    """A call that has its turn.

    Parameters
    ----------
    operation : str
        The verb.
    control : Control
        Its deadline, progress and cancellation.
    backend : SleepModeBackend
        Asked what is where, before and after.
    service : Service
        Asked whether the engine serves.
    """

    def __init__(
        self, operation: str, control: Control, backend: SleepModeBackend, service: Service
    ) -> None:
        self.operation = operation
        self.control = control
        self.before = backend.state()
        self.started = time.perf_counter()
        self.outcome: EngineReport | None = None
        self._backend = backend
        self._service = service

    def report(
        self,
        steps: Sequence[TransitionReport] = (),
        *,
        changed: bool = False,
        plan: Plan | None = None,
    ) -> EngineReport:
        """Say what the call did, from the steps of the backend and what is where now."""
        after = self._backend.state()
        policies: dict[str, Policy | None] = dict.fromkeys(after.tags)
        for step in steps:
            policies.update(
                {tag: change.policy for tag, change in step.tags.items() if change.policy}
            )
        self.outcome = EngineReport(
            operation=self.operation,
            backend=self._backend.name,
            changed=changed or any(step.changed for step in steps),
            serving=self._service.serving,
            sleep_state_before=self._service.sleep_state(self.before),
            sleep_state=self._service.sleep_state(after),
            tags=compare(self.before, after, policies),
            steps=tuple(steps),
            strategy=plan.strategy if plan else None,
            degraded=plan.degraded if plan else False,
            reason=plan.reason if plan else "",
            undefined_tags=after.undefined_tags(),
            seconds=time.perf_counter() - self.started,
        )
        return self.outcome


class Transitions:
    """Gives calls their turn, one at a time, and tells observers how each ended.

    Parameters
    ----------
    backend : SleepModeBackend
        What they work on.
    service : Service
        Remembers the last fault.
    """

    def __init__(self, backend: SleepModeBackend, service: Service) -> None:
        self.lock = TransitionLock()
        self.observers = Observers()
        self.closed = False
        self._backend = backend
        self._service = service

    @contextmanager
    def begin(self, operation: str, control: Control) -> Iterator[Transition]:
        """Wait for the turn, and see that what is raised says who and what.

        Raises
        ------
        ClosedError
            After ``closed`` was set; nothing happened.
        BusyError, TransitionCancelledError
            The turn did not come before the deadline, or the cancellation; nothing
            happened.
        RankLostError, TransitionTimeoutError
            Not every rank of the backend answers; nothing happened.
        """
        asked = time.perf_counter()
        begun = False
        try:
            with self.lock.hold(operation, control):
                if self.closed:
                    raise ClosedError("the orchestrator was closed", hint="create a new one")
                if isinstance(self._backend, RemoteBackend):
                    self._backend.refresh(control)
                transition = Transition(operation, control, self._backend, self._service)
                begun = True
                try:
                    yield transition
                except BaseException as error:
                    self._fail(operation, error)
                    self._tell(operation, transition.started, transition, error)
                    raise
                self._tell(operation, transition.started, transition, None)
        except SleepBackendsError as error:
            if not begun:
                self._fail(operation, error)
                self._tell(operation, asked, None, error)
            raise

    def _fail(self, operation: str, error: BaseException) -> None:
        if isinstance(error, SleepBackendsError):
            error.backend = error.backend or self._backend.name
            error.operation = error.operation or operation
        if isinstance(error, HookError):
            self._service.fault = error

    def _tell(
        self,
        operation: str,
        since: float,
        transition: Transition | None,
        error: BaseException | None,
    ) -> None:
        self.observers.notify(
            Observation(
                operation=operation,
                before=transition.before if transition else None,
                report=transition.outcome if transition and error is None else None,
                error=error,
                seconds=time.perf_counter() - since,
            )
        )
