"""A rank: a backend that takes part in the transitions of a group."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from sleepbackends.errors import RequestError, SleepBackendsError
from sleepbackends.protocol import SleepModeBackend
from sleepbackends.ranks.messages import Answer, Command, Step
from sleepbackends.ranks.participant import Participant, answered, describe, portable


class Rank:
    """Does what a coordinator asks of one backend.

    A rank that hears nothing more undoes what it had begun when the deadline has passed. It
    changes nothing before all ranks have checked the request, and nothing that could not be
    undone before all have done the rest.

    Parameters
    ----------
    backend : SleepModeBackend
        What it is a rank of. Others may use it too, between transitions of the group.
    """

    def __init__(self, backend: SleepModeBackend) -> None:
        self.backend = backend
        self._lock = threading.Lock()
        self._epoch = 0
        self._part: Participant | None = None

    def answer(self, command: Command) -> Answer:
        """Do what is asked, wait until it is done, and answer so that it can be pickled."""
        return portable(self.ask(command).result())

    def ask(self, command: Command) -> Future[Answer]:
        """Have it done; never waits, but for a backend that is being closed."""
        if command.step is Step.LOOK:
            return answered(describe(self.backend, self._epoch))
        if command.step is Step.CLOSE:
            return self._close()
        with self._lock:
            if command.step is Step.BEGIN and command.request is not None:
                if command.epoch <= self._epoch:
                    return self._refused(command)
                if self._part is not None:
                    self._part.abort()  # its coordinator has given it up
                self._epoch = command.epoch
                self._part = Participant(
                    self.backend, command.epoch, command.request, command.timeout_s
                )
                return self._part.begin()
            if self._part is None or command.epoch != self._epoch:
                return self._refused(command)
            part = self._part
        return part.proceed() if command.step is Step.PROCEED else part.abort()

    def abandon(self) -> None:
        """Undo what is going on: its coordinator has gone. Never waits."""
        with self._lock:
            part = self._part
        if part is not None:
            part.abort()

    def _refused(self, command: Command) -> Future[Answer]:
        error = RequestError(
            f"{command.step.value} of transition {command.epoch} came to a rank that is at "
            f"transition {self._epoch}",
            hint="another coordinator drives this rank: let there be one",
        )
        return answered(describe(self.backend, self._epoch, error=error))

    def _close(self) -> Future[Answer]:
        self.abandon()
        error = None
        try:
            self.backend.close()
        except SleepBackendsError as raised:
            error = raised
        return answered(describe(self.backend, self._epoch, error=error))
