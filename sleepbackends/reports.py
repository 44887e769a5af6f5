"""What a transition did, tag by tag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sleepbackends.policies import Policy
from sleepbackends.state import BackendState, TagState


@dataclass(frozen=True)
class TagChange:
    """One tag before and after a transition.

    Parameters
    ----------
    before, after : TagState
        The tag's blocks by residency.
    policy : Policy or None
        The policy followed; None where none was asked for.
    """

    before: TagState
    after: TagState
    policy: Policy | None = None

    @property
    def changed(self) -> bool:
        """Whether anything about the tag is different now."""
        return self.before != self.after

    @property
    def released_bytes(self) -> int:
        """Bytes of memory given back; negative where memory was taken."""
        return self.before.mapped_bytes - self.after.mapped_bytes


@dataclass(frozen=True, kw_only=True)
class TransitionReport:
    """What one call to a backend did.

    Byte counts come from the ledger; device-wide figures are not used, because other
    processes move them.

    Parameters
    ----------
    backend, operation : str
        Who did what.
    changed : bool
        False where everything was already so.
    tags : mapping of str to TagChange
        Every tag the call was about.
    copied_bytes : int
        Bytes copied to save or restore them.
    clean_bytes : int
        Bytes that did not have to be copied, because a good copy was there.
    spared_bytes : int
        By how much what crossed the link was less than ``copied_bytes``, because it was packed.
    seconds : float
        How long it took.
    phases : mapping of str to float
        Seconds spent in its phases. Phases may lie inside one another: blocks are mapped
        while others are being copied.
    ranks : mapping of int to TransitionReport
        What each rank did, where the backend is made of several; everything else here is
        their sum, but for ``phases``, which are those of the slowest.
    """

    backend: str
    operation: str
    changed: bool
    tags: Mapping[str, TagChange] = field(default_factory=dict)
    copied_bytes: int = 0
    clean_bytes: int = 0
    spared_bytes: int = 0
    seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[int, TransitionReport] = field(default_factory=dict)

    @property
    def link_bytes(self) -> int:
        """Bytes that crossed the link for those copied: fewer where they were packed."""
        return self.copied_bytes - self.spared_bytes

    @property
    def packing_ratio(self) -> float:
        """Bytes that crossed the link for each that was copied; 1 where nothing was packed."""
        return self.link_bytes / self.copied_bytes if self.copied_bytes else 1.0

    @property
    def copied_bytes_s(self) -> float:
        """Bytes copied in a second, over all of the transition."""
        return self.copied_bytes / self.seconds if self.seconds else 0.0

    @property
    def released_bytes(self) -> int:
        """Bytes of memory given back in all; negative where memory was taken."""
        return sum(change.released_bytes for change in self.tags.values())

    @property
    def dropped_tags(self) -> frozenset[str]:
        """Tags that lost contents: their epoch went up."""
        return frozenset(
            name for name, change in self.tags.items() if change.after.epoch > change.before.epoch
        )


@dataclass(frozen=True, kw_only=True)
class SuspendReport(TransitionReport):
    """What a suspend did; ``level`` is the level asked for."""

    level: int = 1


@dataclass(frozen=True, kw_only=True)
class ResumeReport(TransitionReport):
    """What a resume did.

    Parameters
    ----------
    undefined_tags : frozenset of str
        Tags that are mapped again and wait to be refilled.
    """

    undefined_tags: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class DiscardReport(TransitionReport):
    """What a discard did."""


@dataclass(frozen=True, kw_only=True)
class StagingReport:
    """What was copied while the engine served.

    Parameters
    ----------
    copied_bytes : int
        Bytes that were copied, with their fingerprints known.
    clean_bytes : int
        Bytes that were saved already.
    skipped_bytes : int
        Bytes that went away or were saved otherwise meanwhile.
    spared_bytes : int
        By how much what crossed the link was less than ``copied_bytes``, because it was packed.
    seconds : float
        How long it took.
    """

    copied_bytes: int = 0
    clean_bytes: int = 0
    skipped_bytes: int = 0
    spared_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What is saved of memory that is in use, and how fast the rest would be.

    Parameters
    ----------
    tags : mapping of str to int
        Bytes with a saved copy, by tag. A suspend copies again what has changed since.
    copy_bytes_s : float, optional
        The best rate at which bytes were saved so far; None before the first were.
    packing_ratio : float, optional
        How many bytes the last suspend saved for each that it copied: less than 1 where they were
        packed; None before the first was.
    """

    tags: Mapping[str, int] = field(default_factory=dict)
    copy_bytes_s: float | None = None
    packing_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class FailureReport(TransitionReport):
    """Where everything is after a transition raised; attached to the error."""


def compare(
    before: BackendState, after: BackendState, policies: Mapping[str, Policy | None]
) -> dict[str, TagChange]:
    """Compare two snapshots for the tags named in ``policies``."""
    nothing = TagState()
    return {
        tag: TagChange(before.tags.get(tag, nothing), after.tags.get(tag, nothing), policy)
        for tag, policy in policies.items()
    }
