"""A group whose ranks are Ray actors, which the user has made and placed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from sleepbackends.errors import RankLostError, RequestError
from sleepbackends.ranks.group import RankGroup
from sleepbackends.ranks.messages import Answer, Command


class RayGroup(RankGroup):
    """Ray actors whose backends move together; whoever makes it is the coordinator.

    An actor makes a ``Rank`` of its backend and has one method that passes a command on::

        @ray.remote(concurrency_groups={"sleepbackends": 4})
        class Worker:
            def __init__(self):
                self.rank = Rank(backend)

            @ray.method(concurrency_group="sleepbackends")
            def sleepbackends_rank(self, command):
                return self.rank.answer(command)

    Such a call lasts as long as the rank works. With threads of their own
    (https://docs.ray.io/en/latest/ray-core/actors/concurrency_group_api.html) an actor answers
    whatever else it does; four are enough for an order to undo while one before it hangs.

    Parameters
    ----------
    actors : sequence of ActorHandle
        The ranks, numbered from 0. Closing the group closes their backends and leaves the
        actors alive.
    method : str
        The name of that method.
    timeout_s, grace_s : float
        See ``RankGroup``.

    Raises
    ------
    RequestError
        If there is no actor, or one has no such method.
    RankLostError, TransitionTimeoutError
        If an actor has died or does not answer.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        method: str = "sleepbackends_rank",
        timeout_s: float = 600.0,
        grace_s: float = 10.0,
    ) -> None:
        for number, actor in enumerate(actors):
            if not hasattr(actor, method):
                raise RequestError(
                    f"the actor of rank {number} has no method {method!r}",
                    hint="give it one that returns Rank.answer(command)",
                )
        super().__init__(
            {number: _Actor(getattr(actor, method)) for number, actor in enumerate(actors)},
            timeout_s=timeout_s,
            grace_s=grace_s,
        )


class _Actor:
    """One actor."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def ask(self, command: Command) -> Future[Answer]:
        answer: Future[Answer] = Future()
        try:
            asked: Future[Answer] = self._method.remote(command).future()
        except Exception as error:  # noqa: BLE001 - whatever Ray raises, the rank cannot be asked
            answer.set_exception(_lost(error))
            return answer
        asked.add_done_callback(_passing_on(answer))
        return answer


def _passing_on(answer: Future[Answer]) -> Callable[[Future[Answer]], None]:
    def pass_on(asked: Future[Answer]) -> None:
        error = asked.exception()
        if error is None:
            answer.set_result(asked.result())
        else:
            answer.set_exception(_lost(error))

    return pass_on


def _lost(error: BaseException) -> RankLostError:
    lines = re.sub(r"\x1b\[\d*m", "", str(error)).strip().splitlines() or [""]
    # The last line is what the actor itself raised, if it did.
    cause = f": {lines[-1]}" if len(lines) > 1 and lines[-1][:1].strip() else ""
    return RankLostError(f"{type(error).__name__}: {lines[0]}{cause}")
