"""A group: a backend made of ranks, which an orchestrator drives like any other."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar, cast

from sleepbackends.capabilities import Capabilities
from sleepbackends.control import Control
from sleepbackends.errors import (
    ClosedError,
    RankLostError,
    RequestError,
    SleepBackendsError,
    TransitionTimeoutError,
    add_note,
)
from sleepbackends.lock import TransitionLock
from sleepbackends.policies import Policies, check_level
from sleepbackends.protocol import API_VERSION
from sleepbackends.ranks.failing import completed, told
from sleepbackends.ranks.merging import (
    NAME,
    common,
    differences,
    merged_reports,
    merged_states,
    named,
)
from sleepbackends.ranks.messages import Answer, Command, Peer, Request, Step
from sleepbackends.ranks.two_phases import Round, TwoPhases, lost
from sleepbackends.reports import (
    DiscardReport,
    ResumeReport,
    SuspendReport,
    TransitionReport,
)
from sleepbackends.state import BackendState, check_tags

T = TypeVar("T")


class RankGroup:
    """A backend made of ranks: all of them move, or none.

    It has the verbs of ``SleepModeBackend``. Its capabilities are what all ranks can do, its
    state and its reports are the sums over them, with each rank's own under ``ranks``.
    Memory is allocated through each rank's own backend.

    Parameters
    ----------
    peers : mapping of int to Peer
        The ranks, by number.
    timeout_s : float
        The deadline of a call that has none. A rank that hears nothing more undoes what it
        had begun some time after it.
    grace_s : float
        How long to wait for a rank that has to undo, or to tell what is where.

    Raises
    ------
    RequestError
        If there is no rank.
    RankLostError, TransitionTimeoutError
        If a rank does not answer.
    """

    name = NAME
    api_version = API_VERSION

    def __init__(
        self, peers: Mapping[int, Peer], *, timeout_s: float = 600.0, grace_s: float = 10.0
    ) -> None:
        if not peers:
            raise RequestError("a group needs a rank", hint="give it at least one")
        self._peers = dict(peers)
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._lock = TransitionLock()
        self._epoch = 0
        self._gone: dict[int, str] = {}
        self._known: dict[int, BackendState] = {}
        self._closed = False
        self.capabilities = Capabilities()
        self._meet()

    # What is so

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of the ranks, without those that were forgotten."""
        return tuple(self._peers)

    @property
    def lost_ranks(self) -> tuple[int, ...]:
        """Ranks whose process is known to have ended."""
        return tuple(sorted(self._gone))

    def state(self) -> BackendState:
        """Return what was heard last of every rank that lives, added up; never waits."""
        return merged_states({n: s for n, s in self._known.items() if n not in self._gone})

    def differences(self) -> list[str]:
        """Say which tags are in different residencies on different ranks; never waits."""
        return differences(self.state())

    def refresh(self, control: Control | None = None) -> None:
        """Ask every rank what is where. An orchestrator does so before each transition.

        Raises
        ------
        RankLostError, TransitionTimeoutError
            Not every rank answers; nothing changed.
        """
        control = self._control(control)
        self._together(Request("refresh"), control, lambda: self._refresh(control))

    def forget_lost(self) -> tuple[int, ...]:
        """Go on without the ranks whose process has ended; return which those were.

        Raises
        ------
        RequestError
            If no rank would be left; nothing changed.
        """
        lost_ranks = self.lost_ranks
        if len(lost_ranks) == len(self._peers):
            raise RequestError(
                "no rank would be left", hint="close the group", operation="forget_lost"
            )
        self._peers = {n: peer for n, peer in self._peers.items() if n not in lost_ranks}
        self._known = {n: state for n, state in self._known.items() if n not in lost_ranks}
        self._gone = {}
        return lost_ranks

    # The verbs

    def suspend(
        self,
        level: int = 1,
        *,
        policies: Policies | None = None,
        control: Control | None = None,
    ) -> SuspendReport:
        """Release memory on all ranks; see ``SleepModeBackend.suspend``.

        Raises
        ------
        RankLostError
            A rank has gone; the others are as before, or as ``error.report`` says.
        SleepBackendsError
            What a rank raised, of the same class.

        Notes
        -----
        Guarantee: if it raises, every rank is as before the call, or ``error.report`` and the
        message say which rank has which tags where.
        """
        check_level(level)
        request = Request("suspend", level=level, policies=policies)
        return cast("SuspendReport", self._transition(request, control))

    def resume(
        self, tags: Collection[str] | None = None, *, control: Control | None = None
    ) -> ResumeReport:
        """Map and restore memory on all ranks; see ``SleepModeBackend.resume``.

        A rank leaves out tags under which it never allocated anything.

        Raises
        ------
        RankLostError
            A rank has gone; on the others everything is still asleep.
        SleepBackendsError
            What a rank raised, of the same class.

        Notes
        -----
        Guarantee: if it raises, everything is still asleep on every rank, or ``error.report``
        and the message say which rank has which tags where. The call can be repeated.
        """
        request = Request.about("resume", tags)
        return cast("ResumeReport", self._transition(request, control, tags))

    def discard(self, tags: Collection[str], *, control: Control | None = None) -> DiscardReport:
        """Drop the named tags on all ranks; see ``SleepModeBackend.discard``.

        Raises
        ------
        RankLostError
            A rank has gone; the others are as ``error.report`` says.
        SleepBackendsError
            What a rank raised, of the same class.

        Notes
        -----
        Guarantee: if it raises, every rank is as before the call, or ``error.report`` and the
        message say which rank has which tags where. The call can be repeated.
        """
        request = Request.about("discard", tags)
        return cast("DiscardReport", self._transition(request, control, tags))

    def mark_valid(self, tags: Collection[str]) -> None:
        """Declare on all ranks that the bytes of UNDEFINED memory were refilled.

        Raises
        ------
        UnknownTagError, PolicyConflictError
            A tag is unknown or not mapped on some rank; nothing changed.
        RankLostError, TransitionTimeoutError
            A rank has gone or does not answer.
        """
        self._transition(Request.about("mark_valid", tags), None, tags)

    def close(self) -> None:
        """Close every rank's backend; saved bytes are dropped. Repeating it does nothing.

        Raises
        ------
        SleepBackendsError
            What a rank raised; the others are closed.
        """
        with self._lock.hold("close", Control()):
            if self._closed:
                return
            self._closed = True
            asked = Round(self._own_peers(), Command(Step.CLOSE))
            asked.wait(self._grace_s)
            self._leave()
        for answer in asked.answers.values():
            if answer.error is not None:
                raise answer.error

    # For groups that need more

    def _own_peers(self) -> dict[int, Peer]:
        """Return the ranks that ``close`` closes."""
        return {n: peer for n, peer in self._peers.items() if n not in self._gone}

    def _leave(self) -> None:
        """Give up the ways to the ranks, which are closed."""

    def _together(self, request: Request, control: Control, run: Callable[[], T]) -> T:
        """Run something that all who call the verbs of this group have to agree on."""
        return run()

    # How

    def _transition(
        self,
        request: Request,
        control: Control | None,
        tags: Collection[str] | None = None,
    ) -> TransitionReport | None:
        control = self._control(control)
        return self._together(request, control, lambda: self._move(request, control, tags))

    def _move(
        self, request: Request, control: Control, tags: Collection[str] | None
    ) -> TransitionReport | None:
        try:
            with self._lock.hold(request.operation, control):
                self._check_open()
                self._check_tags(request.operation, tags, control)
                started = time.perf_counter()
                before = self.state()
                phases = self._phases(request, control, self._peers)
                phases.run()
                self._learn(phases.answers, phases.gone)
                if phases.error is not None:
                    raise self._failed(phases.error, request, phases, before)
                return self._report(request, phases, time.perf_counter() - started)
        except SleepBackendsError as error:
            error.backend = self.name
            error.operation = error.operation or request.operation
            raise

    def _report(
        self, request: Request, phases: TwoPhases, seconds: float
    ) -> TransitionReport | None:
        reports = {n: a.report for n, a in sorted(phases.answers.items()) if a.report is not None}
        fields = {
            "operation": request.operation,
            "seconds": seconds,
            **merged_reports(reports),
        }
        if request.operation == "suspend":
            return SuspendReport(level=request.level, **fields)
        if request.operation == "discard":
            return DiscardReport(**fields)
        if request.operation == "resume":
            undefined = [r.undefined_tags for r in reports.values() if isinstance(r, ResumeReport)]
            return ResumeReport(undefined_tags=frozenset().union(*undefined), **fields)
        return None

    def _failed(
        self, error: SleepBackendsError, request: Request, phases: TwoPhases, before: BackendState
    ) -> SleepBackendsError:
        if request.operation == "suspend":
            self._bring_back(phases, error)
        return completed(error, phases, request.operation, before, self.state(), self.differences())

    def _bring_back(self, phases: TwoPhases, error: SleepBackendsError) -> None:
        """Wake the ranks that were past undoing by themselves when another one failed."""
        moved = {
            number: report
            for number, answer in phases.answers.items()
            if number not in self._gone and (report := told(answer)) is not None and report.changed
        }
        if not moved:
            return
        tags = {tag for report in moved.values() for tag, c in report.tags.items() if c.changed}
        peers = {number: self._peers[number] for number in moved}
        back = self._phases(Request.about("resume", tags), Control(), peers)
        back.run()
        self._learn(back.answers, back.gone)
        if back.error is not None:
            add_note(error, f"what was asleep by then could not be brought back: {back.error}")

    def _phases(self, request: Request, control: Control, peers: Mapping[int, Peer]) -> TwoPhases:
        self._epoch += 1
        return TwoPhases(
            peers,
            request,
            self._epoch,
            control,
            patience_s=self._timeout_s,
            grace_s=self._grace_s,
        )

    def _control(self, control: Control | None) -> Control:
        return control or Control(timeout_s=self._timeout_s)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the group was closed", hint="create a new one")
        if self._gone:
            raise RankLostError(
                lost(self._gone),
                hint="start the engine's rank anew, or forget_lost() and go on with the others",
                ranks=self._gone,
            )

    def _check_tags(self, operation: str, tags: Collection[str] | None, control: Control) -> None:
        if tags is None:
            return
        if isinstance(tags, str) or not set(tags) <= self.state().tags.keys():
            self._look(control, self._grace_s)
        check_tags(tags, self.state().tags, operation)

    def _refresh(self, control: Control) -> None:
        with self._lock.hold("refresh", control):
            self._check_open()
            self._look(control, self._grace_s)

    def _look(self, control: Control, limit_s: float) -> dict[int, Answer]:
        asked = Round(self._peers, Command(Step.LOOK))
        remaining_s = control.remaining_s()
        limit_s = limit_s if remaining_s is None else min(remaining_s, limit_s)
        in_time = asked.wait(limit_s)
        self._learn(asked.answers, asked.gone)
        self._check_open()
        if not in_time:
            raise TransitionTimeoutError(
                f"{named(asked.silent)} did not answer within {limit_s:.3g} s",
                hint="find what blocks it; nothing changed",
            )
        return dict(asked.answers)

    def _learn(self, answers: Mapping[int, Answer], gone: Mapping[int, str]) -> None:
        # Replaced, never changed: readers in other threads do not wait.
        self._gone = {**self._gone, **gone}
        self._known = {**self._known, **{n: answer.state for n, answer in answers.items()}}

    def _meet(self) -> None:
        # They may still be loading the engine.
        answers = self._look(Control(), self._timeout_s)
        self.capabilities = common(answer.capabilities for answer in answers.values())
        self._epoch = max(answer.epoch for answer in answers.values())
