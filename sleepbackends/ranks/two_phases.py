"""The transition of a group: every rank checks, then does what can be undone, then commits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial

from sleepbackends.control import Control, Stage
from sleepbackends.errors import (
    RankLostError,
    SleepBackendsError,
    TransitionCancelledError,
    TransitionTimeoutError,
)
from sleepbackends.ranks.merging import named
from sleepbackends.ranks.messages import Answer, Command, Peer, Request, Step

LISTEN_S = 0.5
"""How long ranks are listened to after the deadline before they are told to undo."""


class Round:
    """One command to some ranks, and what they answered so far.

    Parameters
    ----------
    peers : mapping of int to Peer
        Whom to ask.
    command : Command
        What.
    until_failure : bool
        Whether the first failure ends the wait for the others.
    """

    def __init__(
        self, peers: Mapping[int, Peer], command: Command, *, until_failure: bool = False
    ) -> None:
        self._answers: dict[int, Answer] = {}
        self._gone: dict[int, str] = {}
        self._until_failure = until_failure
        self._left = set(peers)
        self._lock = threading.Lock()
        self._over = threading.Event()
        if not peers:
            self._over.set()
        for number, peer in peers.items():
            peer.ask(command).add_done_callback(partial(self._arrived, number))

    @property
    def answers(self) -> dict[int, Answer]:
        """What was answered so far."""
        with self._lock:
            return dict(self._answers)

    @property
    def gone(self) -> dict[int, str]:
        """Whose process has ended, and how that was noticed."""
        with self._lock:
            return dict(self._gone)

    @property
    def silent(self) -> frozenset[int]:
        """Who has not answered yet."""
        with self._lock:
            return frozenset(self._left)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is over; tell whether it is."""
        return self._over.wait(timeout_s)

    def _arrived(self, number: int, future: Future[Answer]) -> None:
        error = future.exception()
        with self._lock:
            if error is None:
                self._answers[number] = future.result()
            else:
                self._gone[number] = str(error)
            self._left.discard(number)
            failed = error is not None or self._answers[number].error is not None
            if not self._left or (failed and self._until_failure):
                self._over.set()


class TwoPhases:
    """Brings all ranks through one request, or has those that began undo it.

    Parameters
    ----------
    peers : mapping of int to Peer
        The ranks.
    request : Request
        The verb.
    epoch : int
        The number of this transition, higher than all before.
    control : Control
        Deadline, progress and cancellation.
    patience_s : float
        The deadline where ``control`` has none.
    grace_s : float
        How long a rank may take to undo, and to commit once the deadline has passed.

    Attributes
    ----------
    answers : dict of int to Answer
        The last answer of each rank.
    gone : dict of int to str
        Ranks whose process has ended, and how that was noticed.
    silent : frozenset of int
        Ranks that did not say how it ended.
    error : SleepBackendsError or None
        What failed first; None if it went well everywhere.
    failures : dict of int to SleepBackendsError
        What the ranks themselves failed with, in the order in which it was heard.
    """

    def __init__(
        self,
        peers: Mapping[int, Peer],
        request: Request,
        epoch: int,
        control: Control,
        *,
        patience_s: float,
        grace_s: float,
    ) -> None:
        self.answers: dict[int, Answer] = {}
        self.gone: dict[int, str] = {}
        self.silent: frozenset[int] = frozenset()
        self.error: SleepBackendsError | None = None
        self.failures: dict[int, SleepBackendsError] = {}
        self._peers = peers
        self._request = request
        self._epoch = epoch
        self._control = control
        self._grace_s = grace_s
        self._give_up = time.monotonic() + patience_s

    def run(self) -> None:
        """Do it. Raises nothing: ``error`` says how it ended."""
        self._control.start(self._request.operation, 0)
        remaining_s = self._remaining_s()
        self._ask(self._peers, Step.BEGIN, remaining_s)
        started = False
        while self.error is None and (waiting := self._waiting()):
            if not started:
                started = True
                total = sum(answer.total_bytes for answer in self.answers.values())
                self._control.start(self._request.operation, total)
            # Ranks may come to stop at different stages: those behind catch up first.
            stage = min(waiting.values())
            if stage is Stage.UNDOABLE:
                if not self._may_commit():
                    break
                self._control.commit()
            behind = [number for number, at in waiting.items() if at is stage]
            self._ask(behind, Step.PROCEED, remaining_s, final=stage is Stage.UNDOABLE)
        if self.error is not None:
            self._abort()
        if self.error is None:
            self._control.commit()
            for answer in self.answers.values():
                if answer.report is not None:
                    report = answer.report
                    self._control.advance(report.clean_bytes, clean=True)
                    self._control.advance(report.copied_bytes, spared_bytes=report.spared_bytes)

    def _waiting(self) -> dict[int, Stage]:
        return {
            number: answer.stage
            for number, answer in self.answers.items()
            if answer.stage is not None and number not in self.gone
        }

    def _may_commit(self) -> bool:
        try:
            self._control.check(self._request.operation)
        except (TransitionTimeoutError, TransitionCancelledError) as error:
            self.error = error
        return self.error is None

    def _remaining_s(self) -> float:
        patience_s = max(0.0, self._give_up - time.monotonic())
        remaining_s = self._control.remaining_s()
        return patience_s if remaining_s is None else min(remaining_s, patience_s)

    def _ask(
        self, numbers: Collection[int], step: Step, timeout_s: float, *, final: bool = False
    ) -> None:
        command = Command(step, self._epoch, self._request, timeout_s)
        # After the last word every rank is waited for: none of them can undo any more.
        asked = Round(self._those(numbers), command, until_failure=not final)
        in_time = True
        if final:
            in_time = asked.wait(max(self._grace_s, self._remaining_s()))
        else:
            try:
                in_time = self._wait(asked.wait)
            except TransitionCancelledError as error:
                self.error = error
        self._take(asked)
        self._note_failures(asked)
        if not in_time and self.error is None:
            self.silent = asked.silent
            self.error = TransitionTimeoutError(
                f"{self._request.operation} did not finish within {timeout_s:.3g} s",
                hint="allow more time (timeout_s) or find what blocks these ranks",
            )

    def _wait(self, attempt: Callable[[float], bool]) -> bool:
        """Wait until the deadline, or what stands for one."""
        over = False

        def once(seconds: float) -> bool:
            nonlocal over
            over = attempt(min(seconds, self._remaining_s()))
            return over or time.monotonic() >= self._give_up

        self._control.wait(once, self._request.operation)
        # The ranks have the same deadline, and tell what they waited for when it has passed.
        return over or attempt(LISTEN_S)

    def _note_failures(self, asked: Round) -> None:
        for number, answer in asked.answers.items():
            # One that was told to undo and did is no failure of its own.
            if answer.error is not None and not _only_undone(answer.error):
                self.failures.setdefault(number, answer.error)
                self.error = self.error or answer.error
        if self.gone:
            self.error = RankLostError(
                f"{self._request.operation}: {lost(self.gone)}",
                hint="start the engine's rank anew, or forget_lost() and go on with the others",
                ranks=self.gone,
            )

    def _take(self, asked: Round) -> None:
        self.answers.update(asked.answers)
        self.gone.update(asked.gone)

    def _abort(self) -> None:
        """Have every rank that began and has not ended undo what it did."""
        ended = {n for n, answer in self.answers.items() if answer.stage is None}
        asked = Round(self._those(self._peers.keys() - ended), Command(Step.ABORT, self._epoch))
        asked.wait(self._grace_s)
        self._take(asked)
        self._note_failures(asked)
        if isinstance(self.error, TransitionTimeoutError) and self.failures:
            # A rank knows better what it waited for.
            self.error = next(iter(self.failures.values()))
        self.silent = asked.silent
        failed = any(answer.error is not None for answer in self.answers.values())
        if not (failed or self.gone or self.silent):
            # It was given up too late: nobody had anything left to undo.
            self.error = None

    def _those(self, numbers: Collection[int]) -> dict[int, Peer]:
        return {number: self._peers[number] for number in numbers if number not in self.gone}


def _only_undone(error: SleepBackendsError) -> bool:
    return isinstance(error, TransitionCancelledError) and not getattr(error, "__notes__", ())


def lost(gone: Mapping[int, str]) -> str:
    """Say which ranks have gone, and how that was noticed."""
    why = "; ".join(sorted(set(gone.values())))
    verb = "has" if len(gone) == 1 else "have"
    return f"{named(gone)} {verb} gone: {why}"
