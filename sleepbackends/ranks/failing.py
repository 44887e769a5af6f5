"""What is raised when a group's transition failed, and its report, rank by rank."""

from __future__ import annotations

from collections.abc import Collection

from sleepbackends.errors import SleepBackendsError, add_note
from sleepbackends.ranks.merging import merged_reports, named
from sleepbackends.ranks.messages import Answer
from sleepbackends.ranks.two_phases import TwoPhases
from sleepbackends.reports import FailureReport, TransitionReport, compare
from sleepbackends.state import BackendState


def completed(
    error: SleepBackendsError,
    phases: TwoPhases,
    operation: str,
    before: BackendState,
    after: BackendState,
    differences: Collection[str],
) -> SleepBackendsError:
    """Make what failed first say on which rank, what failed besides, and what is where.

    Parameters
    ----------
    error : SleepBackendsError
        What failed first.
    phases : TwoPhases
        The transition.
    operation : str
        The verb.
    before, after : BackendState
        What was and is where, by rank.
    differences : collection of str
        Where ranks differ now.
    """
    parts = [error.message]
    if error in phases.failures.values():
        alike = [n for n, other in phases.failures.items() if other.message == error.message]
        parts = [f"{named(alike)}: {error.message}"]
    for number, other in phases.failures.items():
        if other.message != error.message:
            add_note(error, f"rank {number}: {other}")
    if silent := phases.silent - phases.gone.keys():
        parts.append(f"{named(silent)} did not say how it ended")
    if differences:
        parts.append(f"ranks differ now: {'; '.join(differences)}")
    error.args = ("; ".join(parts),)
    ranks = {
        number: _what_happened(number, answer, operation, before, after)
        for number, answer in sorted(phases.answers.items())
        if number in after.ranks
    }
    error.report = FailureReport(operation=operation, **merged_reports(ranks))
    return error


def told(answer: Answer) -> TransitionReport | None:
    """Return what a rank reports of its part, whether that ended well or not."""
    report = answer.report or (answer.error.report if answer.error is not None else None)
    return report if isinstance(report, TransitionReport) else None


def _what_happened(
    number: int, answer: Answer, operation: str, before: BackendState, after: BackendState
) -> TransitionReport:
    now = after.ranks[number]
    report = told(answer)
    if report is not None:
        # What it says of before is newer than what was heard; it may have changed since.
        was = BackendState({name: change.before for name, change in report.tags.items()})
        tags = compare(was, now, {name: change.policy for name, change in report.tags.items()})
    else:
        tags = compare(before.ranks.get(number, now), now, dict.fromkeys(now.tags))
    return FailureReport(
        backend=answer.who,
        operation=operation,
        changed=any(change.changed for change in tags.values()),
        tags=tags,
    )
