"""The contract between an engine's orchestrator and a sleep-mode backend.

``SleepModeBackend`` is the type; ``sleepbackends.base.BaseBackend`` is the easy way to
meet it, because it brings the ledger, the lock, the transition table and the failure
guarantees, so that a new backend writes its mechanism only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from sleepbackends.capabilities import Capabilities
from sleepbackends.control import Control
from sleepbackends.policies import Policies
from sleepbackends.reports import DiscardReport, ResumeReport, SuspendReport
from sleepbackends.state import BackendState

API_VERSION = 1
"""The version of this contract. A backend states the version it was written for."""


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


class AllocatingBackend(SleepModeBackend, Protocol):
    """A backend that owns allocations (``owns_allocations``)."""

    def region(self, tag: str) -> Any:
        """Open a scope whose allocations carry the tag; a context manager."""
        ...

    def adopt(self, target: Any, tag: str) -> Any:
        """Move existing tensors, or a whole module, into memory of this backend."""
        ...
