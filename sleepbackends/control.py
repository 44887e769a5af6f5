"""The deadline, the progress and the cancellation of one transition."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import NamedTuple

from sleepbackends.errors import TransitionCancelledError, TransitionTimeoutError

logger = logging.getLogger(__name__)

_POLL_S = 0.02


class Progress(NamedTuple):
    """How far a transition has come.

    Parameters
    ----------
    operation : str
        ``"suspend"``, ``"resume"``, ...
    done_bytes, total_bytes : int
        Bytes saved or restored so far, and in all.
    clean_bytes : int
        How many of those done were not copied, because a good copy was there.
    spared_bytes : int
        By how much what was copied was less than the rest of those done, because it was packed.
    """

    operation: str
    done_bytes: int
    total_bytes: int
    clean_bytes: int = 0
    spared_bytes: int = 0


ProgressCallback = Callable[[Progress], None]


class Stage(IntEnum):
    """Where a transition stops until all who take part in it have come as far."""

    CHECKED = 1
    """The request is found good and its memory is reserved; nothing has changed."""
    UNDOABLE = 2
    """All is done that can be undone without a loss; what follows cannot be."""


class Control:
    """Carries a deadline, a progress callback and a cancellation through one transition.

    Parameters
    ----------
    timeout_s : float, optional
        Seconds from now until the transition must give up; None waits for ever.
    on_progress : callable, optional
        Called with a ``Progress`` from the thread that does the work, possibly often.
        What it raises is logged and otherwise ignored.
    """

    def __init__(
        self, *, timeout_s: float | None = None, on_progress: ProgressCallback | None = None
    ) -> None:
        self.timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._on_progress = on_progress
        self._committed = False
        self._cancelled = False
        self._must_finish = False
        self.progress = Progress("", 0, 0)
        self.phases: dict[str, float] = {}

    def remaining_s(self) -> float | None:
        """Return the seconds left, at least 0, or None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def check(self, doing: str = "") -> None:
        """Give up if the deadline has passed or the transition was cancelled.

        Raises
        ------
        TransitionTimeoutError, TransitionCancelledError
            If so. The transition rolls back.
        """
        self._check_cancelled(doing)
        if not self._committed and self.remaining_s() == 0.0:
            what = doing or self.progress.operation or "the transition"
            raise TransitionTimeoutError(
                f"{what} did not finish within {self.timeout_s} s",
                hint="allow more time (timeout_s) or find what blocks it",
            )

    def cancel(self) -> None:
        """Ask the transition to give up; from any thread, and without waiting.

        It rolls back at its next ``check``, or finishes if there is none left or it can
        no longer be undone: which of the two, the call that runs it tells by returning or
        by raising ``TransitionCancelledError``.
        """
        self._cancelled = True

    def wait(self, attempt: Callable[[float], bool], doing: str = "") -> bool:
        """Try until it succeeds, at most until the deadline; tell whether it did.

        Parameters
        ----------
        attempt : callable
            Waits for at most the given number of seconds and tells whether it succeeded.
        doing : str
            Named by the error.

        Raises
        ------
        TransitionCancelledError
            If the transition was cancelled meanwhile.
        """
        while True:
            self._check_cancelled(doing)
            remaining_s = self.remaining_s()
            # In short steps: a lock cannot be waited for together with a cancellation.
            if attempt(_POLL_S if remaining_s is None else min(_POLL_S, remaining_s)):
                return True
            if remaining_s is not None and remaining_s <= _POLL_S:
                return False

    def agree(self, stage: Stage) -> None:
        """Wait until all who take part in the transition have come to a stage.

        One backend alone waits for nobody. Ranks that move together do: what each has done
        by then is undone if another one failed.

        Parameters
        ----------
        stage : Stage
            How far it has come.

        Raises
        ------
        TransitionTimeoutError, TransitionCancelledError
            The others did not come. The transition rolls back.
        """

    def start(self, operation: str, total_bytes: int) -> None:
        """Begin to count the bytes of one operation, under the deadline again."""
        self._committed = False
        self.phases = {}
        self._publish(Progress(operation, 0, total_bytes))

    def commit(self) -> None:
        """Let the operation finish whatever the deadline: it can no longer be undone.

        A cancellation is ignored from here on, in the operations that follow too: what was
        begun is brought to its end.
        """
        self._committed = self._must_finish = True

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the seconds that pass inside to one phase of the operation."""
        return _Phase(self, name)

    def advance(self, size_bytes: int, *, clean: bool = False, spared_bytes: int = 0) -> None:
        """Count bytes as done; clean ones had a good copy and were not copied.

        Parameters
        ----------
        size_bytes : int
            How many are done.
        clean : bool
            Whether they had a good copy.
        spared_bytes : int
            By how much less was copied for them, because it was packed.

        Raises
        ------
        TransitionTimeoutError, TransitionCancelledError
            As ``check``.
        """
        now = self.progress
        clean_bytes = now.clean_bytes + (size_bytes if clean else 0)
        done_bytes = now.done_bytes + size_bytes
        spared_bytes += now.spared_bytes
        self._publish(
            Progress(now.operation, done_bytes, now.total_bytes, clean_bytes, spared_bytes)
        )
        self.check()

    def _check_cancelled(self, doing: str) -> None:
        if self._cancelled and not self._must_finish:
            what = doing or self.progress.operation or "the transition"
            raise TransitionCancelledError(
                f"{what} was cancelled", hint="the same call can be made again"
            )

    def _publish(self, progress: Progress) -> None:
        self.progress = progress
        if self._on_progress is None:
            return
        try:
            self._on_progress(progress)
        except Exception:
            logger.exception("a progress callback raised; the transition goes on")


class _Phase:
    """One stretch of a phase. Entered for every block, where a generator would cost the most."""

    __slots__ = ("_control", "_name", "_started")

    def __init__(self, control: Control, name: str) -> None:
        self._control = control
        self._name = name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = time.perf_counter() - self._started
        phases = self._control.phases
        phases[self._name] = phases.get(self._name, 0.0) + spent
