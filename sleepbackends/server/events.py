"""Server-sent events: transitions that ended, and the progress of the one that goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from pydantic import BaseModel

from sleepbackends.errors import SleepBackendsError
from sleepbackends.observers import Observation
from sleepbackends.orchestrator import Orchestrator
from sleepbackends.server.failures import ErrorReply
from sleepbackends.server.models import ProgressReply, StateReply, TransitionReply

KEPT = 100
"""How many ended transitions are kept for those who come late, or come back."""

_POLL_S = 0.1
_KEEPALIVE_S = 15.0


class EndedEvent(BaseModel):
    """A transition that ended: ``reply`` if it succeeded, ``error`` if it did not."""

    id: int
    at: float
    operation: str
    seconds: float
    reply: TransitionReply | None = None
    error: ErrorReply | None = None


class Feed:
    """Keeps the last transitions of an orchestrator and tells streams of new ones.

    Parameters
    ----------
    orchestrator : Orchestrator
        Whose transitions, by whomever they are made.
    """

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._lock = threading.Lock()
        self._kept: deque[EndedEvent] = deque(maxlen=KEPT)
        self._last_id = 0
        self._waiting: set[Callable[[], None]] = set()
        self._ended = False
        orchestrator.observers.add(self._note)

    async def stream(self, since: int | None = None) -> AsyncIterator[str]:
        """Yield events as text, until ``end``.

        ``ended`` comes for every transition that ended, with an id; an id left out was not
        kept for a stream that was too slow. ``progress`` is sampled.

        Parameters
        ----------
        since : int, optional
            Begin with the kept events after this id; without it, with what comes next.
        """
        loop = asyncio.get_running_loop()
        wake = asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop may be gone when the thread is not
                loop.call_soon_threadsafe(wake.set)

        with self._lock:
            # A client from before a restart knows ids that are not there yet.
            at = self._last_id if since is None else since if since <= self._last_id else 0
            self._waiting.add(tell)
        seen: ProgressReply | None = None
        quiet_since = time.monotonic()
        try:
            yield ": connected\n\n"
            while not self._ended:
                texts = []
                wake.clear()
                for event in self._after(at):
                    at = event.id
                    texts.append(_format("ended", event, event.id))
                progress = self._progress()
                if progress is not None and progress != seen:
                    texts.append(_format("progress", progress))
                seen = progress
                if not texts and time.monotonic() - quiet_since >= _KEEPALIVE_S:
                    texts.append(": still here\n\n")
                for text in texts:
                    quiet_since = time.monotonic()
                    yield text
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(wake.wait(), _POLL_S)
        finally:
            with self._lock:
                self._waiting.discard(tell)

    def end(self) -> None:
        """End all streams, and those that are asked for later at once."""
        self._ended = True
        self._tell_all()

    def _after(self, at: int) -> list[EndedEvent]:
        with self._lock:
            return [event for event in self._kept if event.id > at]

    def _progress(self) -> ProgressReply | None:
        return StateReply.of(self._orchestrator.state()).progress

    def _note(self, seen: Observation) -> None:
        error = seen.error
        if isinstance(error, SleepBackendsError):
            failed = ErrorReply.of(error)
        else:
            failed = ErrorReply(error=type(error).__name__, message=str(error))
        with self._lock:
            self._last_id += 1
            self._kept.append(
                EndedEvent(
                    id=self._last_id,
                    at=time.time(),
                    operation=seen.operation,
                    seconds=seen.seconds,
                    reply=None if seen.report is None else TransitionReply.of(seen.report),
                    error=failed if error is not None else None,
                )
            )
        self._tell_all()

    def _tell_all(self) -> None:
        with self._lock:
            waiting = tuple(self._waiting)
        for tell in waiting:
            tell()


def _format(name: str, data: BaseModel, event_id: int | None = None) -> str:
    head = "" if event_id is None else f"id: {event_id}\n"
    return f"{head}event: {name}\ndata: {data.model_dump_json(by_alias=True)}\n\n"
