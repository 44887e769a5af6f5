"""What leaves a transition that failed: one of our errors, with a report of what is where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sleepbackends.errors import MechanismError, SleepBackendsError, add_note
from sleepbackends.ledger import Ledger
from sleepbackends.reports import FailureReport, compare
from sleepbackends.state import BackendState


@contextmanager
def reporting(backend: str, operation: str, ledger: Ledger, before: BackendState) -> Iterator[None]:
    """Attach a report to what is raised inside, and wrap what is not an error of ours.

    Raises
    ------
    MechanismError
        In place of any other ``Exception``, with that as its cause.
    """
    try:
        yield
    except SleepBackendsError as error:
        _complete(error, backend, operation, ledger, before)
        raise
    except Exception as error:
        wrapped = MechanismError(
            f"{operation} failed: {error!r}",
            hint="error.report says what is where; the call can be repeated",
        )
        _complete(wrapped, backend, operation, ledger, before)
        for note in getattr(error, "__notes__", ()):
            add_note(wrapped, note)
        raise wrapped from error


def _complete(
    error: SleepBackendsError, backend: str, operation: str, ledger: Ledger, before: BackendState
) -> None:
    if error.report is not None:
        return
    tags = compare(before, ledger.state(), dict.fromkeys(before.tags))
    error.report = FailureReport(
        backend=backend,
        operation=operation,
        changed=any(change.changed for change in tags.values()),
        tags=tags,
    )
