"""How tags are released on a backend, whatever it can do: three strategies, one choice.

The strongest strategy the capabilities allow is chosen before anything is released, and
named by the plan and the report. There is no fallback during a resume: only the backend
that suspended can resume.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum
from typing import Literal

from sleepbackends.capabilities import Capabilities
from sleepbackends.control import Control
from sleepbackends.errors import UnsupportedOperationError
from sleepbackends.policies import Policies
from sleepbackends.protocol import SleepModeBackend
from sleepbackends.reports import TransitionReport

OnUnselective = Literal["fallback", "reload_only", "error"]
"""What a release may do on a backend that cannot release selectively."""


class ReleaseStrategy(str, Enum):
    """How the named tags are released."""

    SELECTIVE = "selective"
    """They are discarded; everything else stays resident and untouched."""
    SUSPEND_AND_RELOAD = "suspend_and_reload"
    """Everything is suspended, then everything else is resumed: the same outcome, slower."""
    FULL_SUSPEND = "full_suspend"
    """Everything stays suspended until ``wake_up()``. Degraded: the rest is not resident."""

    @property
    def degraded(self) -> bool:
        """Whether the promise is kept in a weaker way than asked."""
        return self is ReleaseStrategy.FULL_SUSPEND

    @property
    def suspends_everything(self) -> bool:
        """Whether the other tags are suspended too, for a moment or for good."""
        return self is not ReleaseStrategy.SELECTIVE

    @property
    def explanation(self) -> str:
        """One sentence for plans and reports."""
        return {
            ReleaseStrategy.SELECTIVE: "the backend releases selectively",
            ReleaseStrategy.SUSPEND_AND_RELOAD: "the backend cannot release selectively: "
            "everything is suspended and the other tags are resumed at once",
            ReleaseStrategy.FULL_SUSPEND: "the backend can neither release nor resume "
            "selectively: everything stays suspended until wake_up()",
        }[self]


def choose_strategy(
    capabilities: Capabilities, on_unselective: OnUnselective, tags: Collection[str]
) -> ReleaseStrategy:
    """Choose the strongest strategy that capabilities and configuration allow.

    Raises
    ------
    UnsupportedOperationError
        If the configuration forbids what would be needed; nothing changed.
    """
    if capabilities.supports_selective_release:
        return ReleaseStrategy.SELECTIVE
    if on_unselective == "error":
        raise UnsupportedOperationError(
            "the backend cannot release selectively and on_unselective is 'error'",
            hint="allow on_unselective='fallback', or choose a backend with "
            "supports_selective_release",
            operation="release",
            tags=tags,
        )
    if capabilities.supports_selective_resume:
        return ReleaseStrategy.SUSPEND_AND_RELOAD
    if on_unselective == "reload_only":
        raise UnsupportedOperationError(
            "the backend can neither release nor resume selectively and on_unselective is "
            "'reload_only'",
            hint="allow on_unselective='fallback', or choose a backend with "
            "supports_selective_resume",
            operation="release",
            tags=tags,
        )
    return ReleaseStrategy.FULL_SUSPEND


def suspend_level(capabilities: Capabilities) -> int:
    """Return the lightest level at which a full suspend is possible."""
    return 1 if capabilities.supports_offload else 2


def run_release(
    strategy: ReleaseStrategy,
    backend: SleepModeBackend,
    tags: Collection[str],
    policies: Policies,
    control: Control,
) -> Iterator[TransitionReport]:
    """Release the tags by the chosen strategy, yielding each step's report as it ends.

    What was mapped before, other than the named tags, is mapped again at the end of
    ``SUSPEND_AND_RELOAD``; contents that could not be kept are then UNDEFINED.

    Raises
    ------
    SleepBackendsError
        From the step that failed. After a failed second step everything is asleep and its
        saved bytes are kept, so that a resume of everything puts it right.
    """
    if strategy is ReleaseStrategy.SELECTIVE:
        yield backend.discard(tags, control=control)
        return
    state = backend.state().tags
    mapped = {name for name, tag in state.items() if tag.mapped_bytes}
    # Released earlier: asking to save them again would be refused.
    gone = {name for name, tag in state.items() if tag.discarded_bytes}
    yield backend.suspend(
        suspend_level(backend.capabilities),
        policies=policies.discarding({*tags, *gone}),
        control=control,
    )
    others = mapped - frozenset(tags)
    if strategy is ReleaseStrategy.SUSPEND_AND_RELOAD and others:
        # Contents are dropped: no cancellation brings them back, so the rest is resumed.
        control.commit()
        yield backend.resume(others, control=control)
