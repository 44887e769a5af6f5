"""The lock that serialises transitions and knows who holds it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sleepbackends.control import Control
from sleepbackends.errors import BusyError


@dataclass(frozen=True)
class InFlight:
    """A transition that is going on.

    Parameters
    ----------
    operation : str
        What is being done.
    thread : str
        The name of the thread that does it.
    thread_id : int
        Its identifier.
    since : float
        When it began, on the monotonic clock.
    control : Control
        Its deadline and its progress so far.
    """

    operation: str
    thread: str
    thread_id: int
    since: float
    control: Control

    def __str__(self) -> str:
        return f"{self.operation} by thread {self.thread!r}"


class TransitionLock:
    """A lock with a deadline and a name for its holder.

    It is not reentrant: a finalizer that runs inside a transition must find it taken.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.current: InFlight | None = None

    @contextmanager
    def hold(self, operation: str, control: Control) -> Iterator[None]:
        """Hold the lock for one transition.

        Raises
        ------
        BusyError
            If another transition did not end before the deadline, or if this thread is
            inside one already (a hook that calls back); the error names it.
        TransitionCancelledError
            If it was cancelled before it had the lock; nothing happened.
        """
        current = self.current
        if current is not None and current.thread_id == threading.get_ident():
            raise BusyError(
                f"{operation} was called from inside {current}",
                hint="a hook or callback must not start another transition",
                operation=operation,
                holders=[str(current)],
            )
        if not control.wait(lambda seconds: self._lock.acquire(timeout=seconds), operation):
            holder = str(self.current or "a transition that has just ended")
            raise BusyError(
                f"{operation} waited {control.timeout_s} s for {holder}",
                hint="try again when it has finished, or allow more time (timeout_s)",
                operation=operation,
                holders=[holder],
            )
        try:
            thread = threading.current_thread()
            self.current = InFlight(
                operation, thread.name, threading.get_ident(), time.monotonic(), control
            )
            yield
        finally:
            self.current = None
            self._lock.release()

    def try_acquire(self, timeout_s: float = 0.0) -> bool:
        """Take the lock if nobody has it, or within so many seconds. Safe inside a finalizer."""
        return self._lock.acquire(timeout=timeout_s)

    def release(self) -> None:
        """Give back what ``try_acquire`` took."""
        self._lock.release()
