"""The deadline and the progress of one transition."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from sleepbackends.errors import TransitionTimeoutError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """How far a transition has come.

    Parameters
    ----------
    operation : str
        ``"suspend"``, ``"resume"``, ...
    done_bytes, total_bytes : int
        Bytes copied so far, and bytes to copy in all.
    """

    operation: str
    done_bytes: int
    total_bytes: int


ProgressCallback = Callable[[Progress], None]


class Control:
    """Carries a deadline and a progress callback through one transition.

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
        self.progress = Progress("", 0, 0)

    def remaining_s(self) -> float | None:
        """Return the seconds left, at least 0, or None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def check(self, doing: str = "") -> None:
        """Give up if the deadline has passed.

        Raises
        ------
        TransitionTimeoutError
            If it has. The transition rolls back.
        """
        if not self._committed and self.remaining_s() == 0.0:
            what = doing or self.progress.operation or "the transition"
            raise TransitionTimeoutError(
                f"{what} did not finish within {self.timeout_s} s",
                hint="allow more time (timeout_s) or find what blocks it",
            )

    def start(self, operation: str, total_bytes: int) -> None:
        """Begin to count the bytes of one operation, under the deadline again."""
        self._committed = False
        self._publish(Progress(operation, 0, total_bytes))

    def commit(self) -> None:
        """Let the operation finish whatever the deadline: it can no longer be undone."""
        self._committed = True

    def advance(self, size_bytes: int) -> None:
        """Count bytes as done.

        Raises
        ------
        TransitionTimeoutError
            If the deadline has passed.
        """
        now = self.progress
        self._publish(Progress(now.operation, now.done_bytes + size_bytes, now.total_bytes))
        self.check()

    def _publish(self, progress: Progress) -> None:
        self.progress = progress
        if self._on_progress is None:
            return
        try:
            self._on_progress(progress)
        except Exception:
            logger.exception("a progress callback raised; the transition goes on")
