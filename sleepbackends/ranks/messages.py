"""What ranks and their coordinator say to each other. All of it can be pickled."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from sleepbackends.capabilities import Capabilities
from sleepbackends.control import Control, Stage
from sleepbackends.errors import PolicyConflictError, SleepBackendsError
from sleepbackends.plan import plan_sleep, plan_wake
from sleepbackends.policies import Policies
from sleepbackends.protocol import SleepModeBackend
from sleepbackends.reports import TransitionReport
from sleepbackends.state import BackendState


@dataclass(frozen=True)
class Request:
    """One verb of a backend and its arguments.

    Parameters
    ----------
    operation : str
        ``"suspend"``, ``"resume"``, ``"discard"`` or ``"mark_valid"``.
    level : int
        Of a suspend.
    policies : Policies, optional
        Of a suspend.
    tags : frozenset of str, optional
        Of the others. A rank leaves out those under which it never allocated anything.
    """

    operation: str
    level: int = 1
    policies: Policies | None = None
    tags: frozenset[str] | None = None

    @classmethod
    def about(cls, operation: str, tags: Collection[str] | None) -> Request:
        """Ask for a verb that takes tags."""
        return cls(operation, tags=None if tags is None else frozenset(tags))

    def check(self, backend: SleepModeBackend) -> None:
        """Find out what can be found out beforehand of a backend that tells nothing itself.

        Raises
        ------
        RequestError, UnsupportedOperationError
            It would be refused.
        """
        state, policies = backend.state(), self.policies or Policies()
        if self.operation == "suspend":
            plan_sleep(self.level, state, policies, backend.capabilities)
        elif self.operation == "resume":
            plan_wake(self._known(state), state, policies, backend.capabilities)
        elif self.operation == "mark_valid":
            asleep = sorted((self.tags or set()) & state.asleep_tags())
            if asleep:
                raise PolicyConflictError(
                    f"tags {asleep} are asleep and cannot be declared valid",
                    hint=f"resume({asleep}) first, then ask again",
                    tags=asleep,
                )

    def run(self, backend: SleepModeBackend, control: Control) -> TransitionReport | None:
        """Call the verb; None where it reports nothing."""
        tags = self._known(backend.state())
        if self.operation == "suspend":
            return backend.suspend(self.level, policies=self.policies, control=control)
        if self.operation == "resume":
            return backend.resume(tags, control=control)
        if self.operation == "discard":
            return backend.discard(tags or (), control=control)
        backend.mark_valid(tags or ())
        return None

    def _known(self, state: BackendState) -> frozenset[str] | None:
        return None if self.tags is None else self.tags & state.tags.keys()


class Step(str, Enum):
    """What a coordinator may ask of a rank."""

    LOOK = "look"
    """Tell what is where."""
    BEGIN = "begin"
    """Begin a transition, and answer where it stops first."""
    PROCEED = "proceed"
    """Go on, and answer where it stops next."""
    ABORT = "abort"
    """Undo it, and answer when that is done."""
    CLOSE = "close"
    """Close the backend."""


@dataclass(frozen=True)
class Command:
    """What a coordinator asks of a rank.

    Parameters
    ----------
    step : Step
        What to do.
    epoch : int
        The number of the transition. A rank refuses what belongs to an earlier one.
    request : Request, optional
        What to begin.
    timeout_s : float, optional
        How long the transition may take on this rank, the time it waits for others included.
    """

    step: Step
    epoch: int = 0
    request: Request | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a rank tells its coordinator.

    Parameters
    ----------
    who : str
        Its process.
    capabilities : Capabilities
        Of its backend.
    epoch : int
        The last transition it has heard of.
    state : BackendState
        What is where.
    stage : Stage, optional
        Where it waits for the others; None if nothing is going on.
    total_bytes : int
        What it has to copy.
    report : TransitionReport, optional
        What it did, once that has ended well.
    error : SleepBackendsError, optional
        Why not; what it had begun is undone as far as the error's ``report`` says.
    """

    who: str
    capabilities: Capabilities
    epoch: int
    state: BackendState
    stage: Stage | None = None
    total_bytes: int = 0
    report: TransitionReport | None = None
    error: SleepBackendsError | None = None


class Peer(Protocol):
    """One rank as its coordinator sees it."""

    def ask(self, command: Command) -> Future[Answer]:
        """Have the rank do something. Never waits.

        The future raises ``RankLostError`` if the process of the rank is gone, and never
        comes to an end if the rank says nothing.
        """
        ...
