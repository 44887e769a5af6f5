"""What an orchestrator knows and reports about its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from sleepbackends.control import Progress
from sleepbackends.fallback import ReleaseStrategy
from sleepbackends.policies import Policies, Policy
from sleepbackends.reports import TagChange, TransitionReport
from sleepbackends.sleep_state import SleepState
from sleepbackends.state import BackendState


class Status(str, Enum):
    """The engine as a whole, derived from its memory, its gate and its last fault."""

    AWAKE = "awake"
    """Serving; everything is resident and valid."""
    PAUSED = "paused"
    """Not serving although everything is resident and valid."""
    PARTIAL = "partial"
    """Not serving; some memory is resident, some is not or waits to be refilled."""
    ASLEEP = "asleep"
    """Not serving; nothing is mapped but what policies keep."""
    FAULTED = "faulted"
    """Not serving; an engine hook raised. Memory is as ``tags`` say."""


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """A snapshot of one engine; taking it never waits.

    Parameters
    ----------
    status : Status
        The engine as a whole.
    serving : bool
        Whether work is admitted.
    memory : BackendState
        What is where, tag by tag.
    sleep_state : SleepState
        The same in one word.
    pending_hooks : tuple of str
        Hooks that have to run before the engine may serve.
    fault : str
        What the last failed hook said; empty without one.
    transition : str
        The transition that is going on and its thread; empty without one.
    progress : Progress or None
        How far that transition has come.
    """

    status: Status
    serving: bool
    memory: BackendState
    sleep_state: SleepState
    pending_hooks: tuple[str, ...] = ()
    fault: str = ""
    transition: str = ""
    progress: Progress | None = None


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """What one call to an orchestrator did.

    Parameters
    ----------
    operation, backend : str
        What was done by whom.
    changed : bool
        False where everything was already so.
    serving : bool
        Whether the engine serves now.
    sleep_state_before, sleep_state : SleepState
        In one word where the memory was and is.
    tags : mapping of str to TagChange
        Every tag, before and after.
    steps : tuple of TransitionReport
        What the backend did, in order.
    strategy : ReleaseStrategy or None
        How tags were released; None unless this was a release.
    degraded : bool
        Whether it was done in a weaker way than asked.
    reason : str
        Why this strategy.
    undefined_tags : frozenset of str
        Tags that wait for the caller to refill them and to say so with ``mark_valid``.
    seconds : float
        How long it took, hooks included.
    """

    operation: str
    backend: str
    changed: bool
    serving: bool
    sleep_state_before: SleepState
    sleep_state: SleepState
    tags: Mapping[str, TagChange] = field(default_factory=dict)
    steps: tuple[TransitionReport, ...] = ()
    strategy: ReleaseStrategy | None = None
    degraded: bool = False
    reason: str = ""
    undefined_tags: frozenset[str] = frozenset()
    seconds: float = 0.0

    @property
    def released_bytes(self) -> int:
        """Bytes of memory given back; negative where memory was taken."""
        return sum(change.released_bytes for change in self.tags.values())


def derive_status(
    memory: BackendState, policies: Policies, serving: bool, fault: Exception | None
) -> Status:
    """Derive the status of an engine from what is known about it."""
    if fault is not None:
        return Status.FAULTED
    if serving:
        return Status.AWAKE
    if not memory.unusable_tags():
        return Status.PAUSED
    awake = (name for name, tag in memory.tags.items() if tag.mapped_bytes)
    if all(policies.at(name, 1) is Policy.KEEP for name in awake):
        return Status.ASLEEP
    return Status.PARTIAL
