"""One call from an event loop to a thread: its progress, its result, its cancellation."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Generic, TypeVar, overload

from sleepbackends.control import Control, Progress
from sleepbackends.engine_state import EngineState
from sleepbackends.errors import BusyError, TransitionCancelledError, add_note

T = TypeVar("T")


class Outcome(str, Enum):
    """What became of a call that was cancelled."""

    UNCHANGED = "unchanged"
    """It had not begun, or was rolled back: memory is as before the call."""
    COMPLETED = "completed"
    """It could no longer be undone and has succeeded."""
    FAILED = "failed"
    """It raised something else; ``error`` says what is so."""


@dataclass(frozen=True, kw_only=True)
class Aftermath(Generic[T]):
    """What is so after a call was cancelled.

    Parameters
    ----------
    operation : str
        The verb.
    outcome : Outcome
        Whether it was undone, has succeeded or has failed.
    result : object
        What the call would have returned; None unless it has succeeded.
    error : BaseException or None
        What it raised; None if it did not begin or has succeeded.
    state : EngineState
        What is where now.
    """

    operation: str
    outcome: Outcome
    result: T | None
    error: BaseException | None
    state: EngineState

    def __str__(self) -> str:
        why = f" ({self.error})" if self.outcome is Outcome.FAILED else ""
        return (
            f"the cancelled {self.operation} is {self.outcome.value}{why}; "
            f"the engine is {self.state.status.value}"
        )


def aftermath_of(error: BaseException) -> Aftermath[Any] | None:
    """Return what is so after a cancellation, from the error it was or came to.

    That may be the ``CancelledError`` itself, a ``TimeoutError`` that was made of it, or, up
    to Python 3.10, another ``CancelledError`` that a task raises in its place.

    Parameters
    ----------
    error : BaseException
        The error.
    """
    at: BaseException | None = error
    while at is not None:
        aftermath = getattr(at, "aftermath", None)
        if isinstance(aftermath, Aftermath):
            return aftermath
        at = at.__cause__ or at.__context__
    return None


class Work(Generic[T]):
    """What a call has a thread do.

    Parameters
    ----------
    operation : str
        The verb.
    run : callable
        Does it, under the control it is given.
    submit : callable
        Has a thread run something, in turn.
    state : callable
        Tells what is where; never waits.
    timeout_s : float, optional
        Deadline, from the moment the call is started.
    cancellable : bool
        Whether a cancellation reaches the work; otherwise it is only waited for.
    """

    def __init__(
        self,
        operation: str,
        run: Callable[[Control], T],
        *,
        submit: Callable[[Callable[[], T]], Future[T]],
        state: Callable[[], EngineState],
        timeout_s: float | None = None,
        cancellable: bool = True,
    ) -> None:
        self.operation = operation
        self.run = run
        self.submit = submit
        self.state = state
        self.timeout_s = timeout_s
        self.cancellable = cancellable


class Call(Coroutine[Any, Any, T], AsyncIterator[Progress]):
    """A coroutine that is also an asynchronous iterator of its own progress.

    ``await`` it, make a task of it, or iterate over it first: ``async for`` yields the
    newest ``Progress`` whenever there is one (steps that pass too quickly are left out) and
    raises what the call raises. It starts when it is first awaited or iterated over, and
    goes on when an iteration is left early; awaiting it again gives the same result.

    If the task is cancelled meanwhile, so is the work. ``CancelledError`` is raised only
    when the thread has finished. It carries the ``Aftermath``, which ``aftermath_of`` finds,
    as its attribute ``aftermath`` and as a note.

    Parameters
    ----------
    work : Work
        What a thread does.

    Attributes
    ----------
    aftermath : Aftermath or None
        What is so after a cancellation; None without one.
    """

    def __init__(self, work: Work[T]) -> None:
        self.aftermath: Aftermath[T] | None = None
        self._work = work
        self._started: _Started[T] | None = None
        self._driven: Coroutine[Any, Any, T] | None = None
        self._taken_up = False

    def __await__(self) -> Generator[Any, Any, T]:
        self._taken_up = True
        return self._finish().__await__()

    def __del__(self) -> None:
        if not self._taken_up:
            # A coroutine of Python's own would warn likewise.
            warnings.warn(
                f"{self._work.operation} was neither awaited nor iterated over: nothing was done",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )

    def send(self, value: Any) -> Any:
        """Advance the coroutine; for event loops."""
        return self._coroutine().send(value)

    @overload
    def throw(
        self,
        typ: type[BaseException],
        val: BaseException | object = None,
        tb: TracebackType | None = None,
        /,
    ) -> Any: ...
    @overload
    def throw(
        self, typ: BaseException, val: None = None, tb: TracebackType | None = None, /
    ) -> Any: ...
    def throw(self, typ: Any, val: Any = None, tb: TracebackType | None = None, /) -> Any:
        """Raise inside the coroutine; for event loops."""
        error = typ if isinstance(typ, BaseException) else typ() if val is None else val
        try:
            return self._coroutine().throw(error.with_traceback(tb) if tb else error)
        except asyncio.CancelledError as cancelled:
            if self._started is None:
                self._tell(cancelled, _aftermath(self._work, Outcome.UNCHANGED))
            raise

    def close(self) -> None:
        """Close the coroutine; for event loops."""
        self._coroutine().close()

    def __aiter__(self) -> Call[T]:
        self._taken_up = True
        self._start().follow()
        return self

    async def __anext__(self) -> Progress:
        """Wait for progress.

        Raises
        ------
        StopAsyncIteration
            When the call has succeeded.
        SleepBackendsError
            What the call raises.
        """
        started = self._start()
        while (progress := started.take_progress()) is None:
            if started.future.done():
                started.result()
                raise StopAsyncIteration
            await self._guarded(started, started.woken())
        return progress

    def _coroutine(self) -> Coroutine[Any, Any, T]:
        self._taken_up = True
        if self._driven is None:
            self._driven = self._finish()
        return self._driven

    async def _finish(self) -> T:
        started = self._start()
        await self._guarded(started, started.ended())
        return started.result()

    def _start(self) -> _Started[T]:
        if self._started is None:
            self._started = _Started(self._work)
        return self._started

    async def _guarded(self, started: _Started[T], waiting: Awaitable[None]) -> None:
        try:
            await waiting
        except asyncio.CancelledError as cancelled:
            started.cancel()
            while not started.future.done():
                # The work has been told; another cancellation has nothing to add.
                with suppress(asyncio.CancelledError):
                    await started.ended()
            self._tell(cancelled, started.aftermath())
            raise

    def _tell(self, cancelled: asyncio.CancelledError, aftermath: Aftermath[T]) -> None:
        self.aftermath = aftermath
        cancelled.aftermath = aftermath  # type: ignore[attr-defined]
        add_note(cancelled, str(aftermath))


class _Started(Generic[T]):
    """A call that was handed to its thread; belongs to the running event loop."""

    def __init__(self, work: Work[T]) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._control = Control(timeout_s=work.timeout_s, on_progress=self._publish)
        self._context = copy_context()
        self._followed = False
        self._waking = False
        self._progress: Progress | None = None
        self._wake = asyncio.Event()
        self._waited_for = ""
        self._job = work.submit(lambda: self._context.run(work.run, self._control))
        self.future = asyncio.wrap_future(self._job)
        self.future.add_done_callback(lambda _: self._wake.set())
        if work.timeout_s is not None:
            timer = self._loop.call_later(work.timeout_s, self._expire)
            self.future.add_done_callback(lambda _: timer.cancel())

    def follow(self) -> None:
        self._followed = True

    def take_progress(self) -> Progress | None:
        progress, self._progress = self._progress, None
        return progress

    async def woken(self) -> None:
        await self._wake.wait()
        if not self.future.done():
            self._wake.clear()

    async def ended(self) -> None:
        await asyncio.wait([self.future])

    def cancel(self) -> None:
        if self._work.cancellable:
            self._control.cancel()
            self._job.cancel()

    def result(self) -> T:
        if not self.future.cancelled():
            return self.future.result()
        operation = self._work.operation
        if self._waited_for:
            raise BusyError(
                f"{operation} waited {self._work.timeout_s} s for {self._waited_for}",
                hint="try again when it has finished, or allow more time (timeout_s)",
                operation=operation,
                holders=[self._waited_for],
            )
        raise TransitionCancelledError(
            f"{operation} was cancelled before it began",
            hint="the same call can be made again",
            operation=operation,
        )

    def aftermath(self) -> Aftermath[T]:
        if self.future.cancelled():
            return _aftermath(self._work, Outcome.UNCHANGED)
        error = self.future.exception()
        if error is None:
            return _aftermath(self._work, Outcome.COMPLETED, result=self.future.result())
        outcome = Outcome.UNCHANGED if _undone(error) else Outcome.FAILED
        return _aftermath(self._work, outcome, error=error)

    def _expire(self) -> None:
        # Only what is still queued: once it runs, the control sees to the deadline.
        if self._job.cancel():
            self._waited_for = self._work.state().transition or "a call before it"

    def _publish(self, progress: Progress) -> None:
        self._progress = progress
        if self._followed and not self._waking:
            self._waking = True
            # The loop may be gone when the thread is not; nobody is left to be told then.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._woken)

    def _woken(self) -> None:
        self._waking = False
        self._wake.set()


def _aftermath(
    work: Work[T],
    outcome: Outcome,
    *,
    result: T | None = None,
    error: BaseException | None = None,
) -> Aftermath[T]:
    return Aftermath(
        operation=work.operation, outcome=outcome, result=result, error=error, state=work.state()
    )


def _undone(error: BaseException | None) -> bool:
    return isinstance(error, TransitionCancelledError) and not (
        error.report is not None and error.report.changed
    )
