"""The two ends between rank 0 and another process: commands one way, answers the other."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sleepbackends.capabilities import Capabilities
from sleepbackends.errors import RankLostError, SleepBackendsError, TransitionTimeoutError
from sleepbackends.ranks.channel import Channel
from sleepbackends.ranks.messages import Answer, Command, Request
from sleepbackends.ranks.participant import portable, portable_error
from sleepbackends.ranks.rank import Rank
from sleepbackends.state import BackendState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class _Ask:
    number: int
    command: Command


@dataclass(frozen=True)
class _Reply:
    number: int
    answer: Answer


@dataclass(frozen=True)
class Call:
    """A rank has come to a verb; without a request, it waits for its end no longer."""

    number: int
    request: Request | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the verb ended that a rank has come to, and what rank 0 knows of all ranks.

    Parameters
    ----------
    number : int
        Which call of that rank; 0 answers none and introduces the group.
    result : object
        What the verb returns.
    error : SleepBackendsError, optional
        What it raises instead.
    capabilities : Capabilities
        Of the group.
    states : dict of int to BackendState
        What was heard last of each rank.
    gone : dict of int to str
        Ranks whose process has ended.
    """

    number: int
    result: Any
    error: SleepBackendsError | None
    capabilities: Capabilities
    states: dict[int, BackendState]
    gone: dict[int, str]


class RemoteRank:
    """Rank 0's end: another rank, as a ``Peer`` that may come to verbs by itself.

    Parameters
    ----------
    side : ProcessGroup
        A gloo group for nothing else.
    member : int
        The global rank of its process.
    changed : Condition
        Notified when ``call`` or ``gone`` has changed.
    """

    def __init__(self, side: ProcessGroup, member: int, changed: threading.Condition) -> None:
        self.call: Call | None = None
        self.gone: str | None = None
        self._changed = changed
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Answer]] = {}
        self._channel = Channel(side, member, self._heard, self._ended)
        self._channel.start()

    def ask(self, command: Command) -> Future[Answer]:
        """Have the rank do something; see ``Peer.ask``."""
        future: Future[Answer] = Future()
        with self._changed:
            gone, number = self.gone, next(self._numbers)
            if gone is None:
                self._asked[number] = future
        if gone is None:
            self._channel.send(_Ask(number, command))
        else:
            future.set_exception(RankLostError(gone))
        return future

    def tell(self, make: Callable[[int], Outcome]) -> None:
        """Tell it how the verb ended it has come to, if it has."""
        with self._changed:
            call, self.call = self.call, None
        if call is not None:
            self.introduce(make(call.number))

    def introduce(self, outcome: Outcome) -> None:
        """Send an outcome, whether it has come to a verb or not."""
        error = None if outcome.error is None else portable_error(outcome.error)
        self._channel.send(replace(outcome, error=error))

    def leave(self) -> None:
        """Say that nothing follows."""
        self._channel.end()

    def join(self, timeout_s: float) -> None:
        """Wait until the other side has said so too."""
        self._channel.join(timeout_s)

    def _heard(self, message: _Reply | Call) -> None:
        if isinstance(message, _Reply):
            with self._changed:
                future = self._asked.pop(message.number)
            future.set_result(message.answer)
        else:
            with self._changed:
                self.call = message if message.request is not None else None
                self._changed.notify_all()

    def _ended(self, reason: str | None) -> None:
        with self._changed:
            self.gone = gone = reason or "it has left the group"
            asked, self._asked = self._asked, {}
            self._changed.notify_all()
        for future in asked.values():
            future.set_exception(RankLostError(gone))


class Coordinator:
    """Another rank's end: answers what rank 0 asks, and tells it which verb was come to.

    Parameters
    ----------
    side : ProcessGroup
        A gloo group for nothing else.
    member : int
        The global rank of rank 0.
    rank : Rank
        What is asked.
    """

    def __init__(self, side: ProcessGroup, member: int, rank: Rank) -> None:
        self._rank = rank
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._outcome: Outcome | None = None
        self._over = False
        self._reason: str | None = None
        self._channel = Channel(side, member, self._heard, self._ended)
        self._channel.start()

    def call(self, request: Request, timeout_s: float) -> Outcome:
        """Come to a verb, and return how it ended.

        Raises
        ------
        RankLostError
            Rank 0 has gone.
        TransitionTimeoutError
            It has not come to the verb, or not told how it ended.
        """
        number = next(self._numbers)
        self._channel.send(Call(number, request))
        try:
            return self.outcome(number, timeout_s, request.operation)
        except TransitionTimeoutError:
            self._channel.send(Call(number, None))
            raise

    def outcome(self, number: int, timeout_s: float, operation: str) -> Outcome:
        """Wait for the outcome of that number; raises as ``call``."""

        def come() -> bool:
            return self._over or (self._outcome is not None and self._outcome.number == number)

        with self._changed:
            in_time = self._changed.wait_for(come, timeout_s)
            found = self._outcome
        if found is not None and found.number == number:
            return found
        if not in_time:
            raise TransitionTimeoutError(
                f"rank 0 did not tell within {timeout_s:.3g} s how {operation} ended",
                hint="in SPMD style every rank makes the same calls",
            )
        raise self._lost()

    def wait(self, timeout_s: float) -> None:
        """Wait until rank 0 has left, and then until it has heard that this rank has, too.

        Parameters
        ----------
        timeout_s : float
            How long to wait for the latter.

        Raises
        ------
        RankLostError
            It has gone without saying so.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over)
        self._channel.join(timeout_s)
        if self._reason is not None:
            raise self._lost()

    def leave(self, timeout_s: float) -> None:
        """Say that nothing follows, and wait until rank 0 has said so too."""
        self._channel.end()
        self._channel.join(timeout_s)

    def _lost(self) -> RankLostError:
        return RankLostError(
            f"rank 0 has gone: {self._reason or 'it has left the group'}",
            hint="what it had begun is undone here; the backend of this rank can be used",
            ranks=[0],
        )

    def _heard(self, message: _Ask | Outcome) -> None:
        if isinstance(message, _Ask):
            answer = self._rank.ask(message.command)
            answer.add_done_callback(partial(self._reply, message.number))
        else:
            with self._changed:
                self._outcome = message
                self._changed.notify_all()

    def _reply(self, number: int, answer: Future[Answer]) -> None:
        self._channel.send(_Reply(number, portable(answer.result())))

    def _ended(self, reason: str | None) -> None:
        self._rank.abandon()
        with self._changed:
            self._over, self._reason = True, reason
            self._changed.notify_all()
