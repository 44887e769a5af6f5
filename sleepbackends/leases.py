"""The admission guard: who is using the memory, and the gate that keeps others out."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from sleepbackends.control import Control
from sleepbackends.errors import BusyError, SuspendedError


class Leases:
    """Counts the users of the memory, and closes the gate before a transition.

    Work is admitted where it starts, so that a request that arrives while the engine is
    asleep gets an error at once instead of touching memory that is not there.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holders: Counter[str] = Counter()
        self._threads: Counter[int] = Counter()
        self._closed_for: str | None = None

    @contextmanager
    def hold(self, holder: str, *, partial: bool = False) -> Iterator[None]:
        """Be counted as a user of the memory.

        Parameters
        ----------
        holder : str
            Named when a transition waits in vain.
        partial : bool
            Pass the closed gate: the work needs part of the memory only, and its caller
            checks which.

        Raises
        ------
        SuspendedError
            If the gate is closed.
        """
        ident = threading.get_ident()
        with self._changed:
            if self._closed_for is not None and not partial:
                raise SuspendedError(
                    f"{holder} was not admitted: {self._closed_for}",
                    hint="wait until the engine is awake, or call wake_up()",
                )
            self._holders[holder] += 1
            self._threads[ident] += 1
        try:
            yield
        finally:
            with self._changed:
                self._holders[holder] -= 1
                self._threads[ident] -= 1
                self._changed.notify_all()

    def close_gate(self, reason: str) -> None:
        """Admit nobody any more; whoever is inside goes on."""
        with self._changed:
            self._closed_for = reason

    def open_gate(self) -> None:
        """Admit again."""
        with self._changed:
            self._closed_for = None

    @property
    def is_open(self) -> bool:
        """Whether users are admitted."""
        return self._closed_for is None

    def drain(self, control: Control) -> None:
        """Wait until nobody is inside.

        Raises
        ------
        BusyError
            If somebody still is at the deadline, or this very thread is, which could never
            leave; the error names the holders.
        TransitionCancelledError
            If the transition was cancelled meanwhile.
        """
        with self._changed:
            own = self._threads[threading.get_ident()] > 0
            if own or not control.wait(
                lambda seconds: self._changed.wait_for(self._is_empty, seconds)
            ):
                holders = sorted(+self._holders)
                where = "in this very thread" if own else f"after {control.timeout_s} s"
                raise BusyError(
                    f"memory is still in use {where}: {', '.join(holders)}",
                    hint="let the work finish (or quiesce it in the hook) before the transition",
                    holders=holders,
                )

    def _is_empty(self) -> bool:
        return not +self._holders
