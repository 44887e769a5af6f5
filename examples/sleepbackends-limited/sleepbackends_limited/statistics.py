"""What was done so far, call by call."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from sleepbackends import TransitionReport


@dataclass(frozen=True)
class Counted:
    """One kind of call, added up.

    Parameters
    ----------
    calls : int
        How many there were.
    failures : int
        How many of them raised.
    released_bytes, copied_bytes : int
        What their reports say.
    seconds : float
        How long they took, failures included.
    """

    calls: int = 0
    failures: int = 0
    released_bytes: int = 0
    copied_bytes: int = 0
    seconds: float = 0.0


class Statistics:
    """Counts calls by their operation; may be read and written in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: defaultdict[str, Counted] = defaultdict(Counted)

    def of(self, operation: str) -> Counted:
        """Return what there was of one operation."""
        with self._lock:
            return self._counted[operation]

    def add(self, report: TransitionReport) -> None:
        """Count in what a call did."""
        with self._lock:
            so_far = self._counted[report.operation]
            self._counted[report.operation] = replace(
                so_far,
                released_bytes=so_far.released_bytes + report.released_bytes,
                copied_bytes=so_far.copied_bytes + report.copied_bytes,
            )

    @contextmanager
    def counting(self, operation: str) -> Iterator[None]:
        """Count a call, whether it raises, and how long it takes."""
        started, failed = time.perf_counter(), 1
        try:
            yield
            failed = 0
        finally:
            with self._lock:
                so_far = self._counted[operation]
                self._counted[operation] = replace(
                    so_far,
                    calls=so_far.calls + 1,
                    failures=so_far.failures + failed,
                    seconds=so_far.seconds + time.perf_counter() - started,
                )
