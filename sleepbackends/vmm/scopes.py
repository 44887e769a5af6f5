"""Scopes in which torch allocates, and the transitions that must not happen meanwhile.

A live pool of torch hands out parts of segments it already has. Were such a segment unmapped
while its scope is open, the next tensor in that scope would lie in memory that is not there.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from sleepbackends.control import Control
from sleepbackends.errors import BusyError


class Scopes:
    """Counts open scopes by thread, and holds new ones back while a transition waits or runs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: Counter[int] = Counter()
        self._transitions = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Be a scope of this thread; waits for transitions, unless one is open here already."""
        ident = threading.get_ident()
        with self._changed:
            if not self._open[ident]:
                self._changed.wait_for(lambda: not self._transitions)
            self._open[ident] += 1
        try:
            yield
        finally:
            with self._changed:
                self._open[ident] -= 1
                self._changed.notify_all()

    @contextmanager
    def none(self, operation: str, control: Control) -> Iterator[None]:
        """Be a transition: wait until no scope is open, and let none open until the end.

        Raises
        ------
        BusyError
            If one is still open at the deadline, or is open in this very thread.
        """
        with self._changed:
            self._transitions += 1
            try:
                own = self._open[threading.get_ident()] > 0
                closed = not own and self._changed.wait_for(
                    lambda: not +self._open, control.remaining_s()
                )
                if not closed:
                    raise BusyError(
                        f"{operation} is not possible while a region is open "
                        f"{'in this thread' if own else 'in another thread'}",
                        hint="leave the region (its 'with' block) first",
                        operation=operation,
                        holders=[f"region in thread {ident}" for ident in +self._open],
                    )
            except BaseException:
                self._leave()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._leave()

    def _leave(self) -> None:
        self._transitions -= 1
        self._changed.notify_all()
