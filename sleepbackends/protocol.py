"""The contract between an engine's orchestrator and a sleep-mode backend.

``SleepModeBackend`` is the type; ``sleepbackends.base.BaseBackend`` is the easy way to
meet it, because it brings the ledger, the lock, the transition table and the failure
guarantees, so that a new backend writes its mechanism only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

from sleepbackends.capabilities import Capabilities
from sleepbackends.control import Control
from sleepbackends.policies import Policies, check_level
from sleepbackends.reports import (
    DiscardReport,
    ResumeReport,
    Staged,
    StagingReport,
    SuspendReport,
)
from sleepbackends.state import BackendState

API_VERSION = 1
"""The version of this contract. A backend states the version it was written for."""

OLDEST_API_VERSION = 1
"""The oldest version that a backend may still be written for; before ``API_VERSION``, it is used
with a warning."""


class SleepModeBackend(Protocol):
    """Releases memory by tag and takes it again.

    Attributes
    ----------
    name : str
        The name it is registered under.
    api_version : int
        The version of this contract it was written for.
    capabilities : Capabilities
        What this instance can do on this machine.
    """

    name: str
    api_version: int
    capabilities: Capabilities

    def suspend(
        self,
        level: int = 1,
        *,
        policies: Policies | None = None,
        control: Control | None = None,
    ) -> SuspendReport:
        """Release memory following each tag's policy.

        Parameters
        ----------
        level : int
            0 does nothing, 1 keeps contents, 2 drops what can be reloaded.
        policies : Policies, optional
            Use these policies for this call instead of the configured ones.
        control : Control, optional
            Deadline and progress.

        Raises
        ------
        RequestError
            The request was refused; nothing changed.
        NoRoomError
            No room for the saved bytes; nothing changed.
        TransitionTimeoutError, MechanismError
            It failed half-way.

        Notes
        -----
        Guarantee: if it raises, either nothing changed, or ``error.report`` says exactly
        which tags are where. No bytes that a policy keeps are lost, and the call can be
        repeated.
        """
        ...

    def resume(
        self, tags: Collection[str] | None = None, *, control: Control | None = None
    ) -> ResumeReport:
        """Map memory again at the same addresses and restore what was kept.

        Parameters
        ----------
        tags : collection of str, optional
            Which tags; None means all. Tags that are resident are left alone.
        control : Control, optional
            Deadline and progress.

        Raises
        ------
        UnsupportedOperationError
            Some but not all of what is asleep was named and the backend cannot resume
            selectively; nothing changed.
        NoRoomError
            Not enough memory; everything is still asleep.
        ContentsLostError
            Saved bytes are damaged; they were not used.
        TransitionTimeoutError, MechanismError
            It failed half-way and was undone.

        Notes
        -----
        Guarantee: if it raises, everything it was to wake is still asleep, saved bytes
        are still saved, and the call can be repeated. Contents that were discarded come
        back UNDEFINED (zeros by default) until ``mark_valid``.
        """
        ...

    def discard(self, tags: Collection[str], *, control: Control | None = None) -> DiscardReport:
        """Release the named tags and forget their bytes; the rest stays resident.

        Raises
        ------
        UnsupportedOperationError
            The backend cannot release selectively; nothing changed.
        PolicyConflictError
            A tag is offloaded, so that its saved bytes would be lost, or its policy is
            ``keep``; nothing changed.
        MechanismError
            It failed half-way.

        Notes
        -----
        Guarantee: if it raises, either nothing changed, or ``error.report`` says exactly
        which tags are where. The call can be repeated.
        """
        ...

    def mark_valid(self, tags: Collection[str]) -> None:
        """Declare that the bytes of UNDEFINED memory were refilled.

        Raises
        ------
        UnknownTagError, PolicyConflictError
            A tag is unknown or not mapped; nothing changed.

        Notes
        -----
        Guarantee: if it raises, nothing changed.
        """
        ...

    def state(self) -> BackendState:
        """Return what is where, without waiting for anything and without changing anything."""
        ...

    def close(self) -> None:
        """Give back everything the backend holds for itself; saved bytes are dropped.

        Memory that the user still refers to stays valid if it is mapped. Repeating the
        call does nothing.
        """
        ...


class Staging(Protocol):
    """Copies that are being made while the memory is in use."""

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or another."""
        ...

    def pause(self) -> None:
        """Copy nothing more until ``proceed``; what is being copied now is finished."""
        ...

    def proceed(self) -> None:
        """Go on after ``pause``."""
        ...

    def cancel(self) -> None:
        """Stop; what was staged so far is kept."""
        ...

    def wait(self, timeout_s: float | None = None) -> StagingReport:
        """Wait until it has ended and tell what was done.

        Raises
        ------
        TimeoutError
            If it has not ended in time; it goes on.
        SleepBackendsError
            If it failed. What was staged before is kept, and nothing else was touched.
        """
        ...


class StagingBackend(SleepModeBackend, Protocol):
    """A backend that can copy ahead (``supports_staging``)."""

    def stage(
        self,
        tags: Collection[str] | None = None,
        *,
        background: bool = True,
        limit_gib_s: float = 2.0,
    ) -> Staging:
        """Make or refresh saved copies while the memory is in use.

        A copy that the user tears by writing meanwhile is never taken for good. A staging
        that is going on is ended first. Transitions do not wait for a staging, but for a
        few milliseconds of it.

        Parameters
        ----------
        tags : collection of str, optional
            Which tags; by default those that a suspend at level 1 offloads. What is asleep
            is left alone.
        background : bool
            Whether to return at once and do it in another thread.
        limit_gib_s : float
            The most to copy in a second.

        Raises
        ------
        RequestError
            If the limit is not positive, or a tag is unknown.
        UnsupportedOperationError
            If the backend cannot stage.
        """
        ...

    def staged(self) -> Staged:
        """Tell what is saved of memory that is in use."""
        ...


class LayeredBackend(SleepModeBackend, Protocol):
    """A backend whose sleeps differ in depth, and with it in what survives them."""

    def capabilities_of_sleep(self, level: int, policies: Policies) -> Capabilities:
        """Return the flags that hold for one sleep."""
        ...


def capabilities_of_sleep(
    backend: SleepModeBackend, level: int, policies: Policies
) -> Capabilities:
    """Return what is true of one sleep: the backend's flags, unless its sleeps differ.

    Raises
    ------
    InvalidLevelError
        If there is no such level.
    """
    check_level(level)
    ask: Any = getattr(backend, "capabilities_of_sleep", None)
    answer: Capabilities = backend.capabilities if ask is None else ask(level, policies)
    return answer


@runtime_checkable
class RemoteBackend(Protocol):
    """A backend whose memory lies in other processes: ``state()`` is what was heard last."""

    def refresh(self, control: Control | None = None) -> None:
        """Ask anew what is where; called before each transition.

        Raises
        ------
        RankLostError, TransitionTimeoutError, TransitionCancelledError
            Nobody or not everybody answered; nothing changed.
        """
        ...


class AllocatingBackend(SleepModeBackend, Protocol):
    """A backend that owns allocations (``owns_allocations``)."""

    def region(self, tag: str) -> Any:
        """Open a scope whose allocations carry the tag; a context manager."""
        ...

    def adopt(self, target: Any, tag: str) -> Any:
        """Move existing tensors, or a whole module, into memory of this backend."""
        ...
