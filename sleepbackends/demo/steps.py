"""What the demo tells while it runs: what it is about to do, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from sleepbackends import Plan, ReleaseStrategy


@dataclass(frozen=True)
class PlannedRelease:
    """The plan of a release, told before it is carried out.

    Parameters
    ----------
    backend : str
        Who is about to do it.
    plan : Plan
        What is about to be done.
    """

    backend: str
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the demo.

    Parameters
    ----------
    name, backend : str
        What was done by whom.
    before_bytes, after_bytes : int
        Memory in use before and after, as measured from outside the backend.
    seconds : float
        How long it took; checks are not counted.
    differences : tuple of str
        What was not as it has to be; empty if nothing.
    degraded : bool
        Whether it was done in a weaker way than asked.
    planned, strategy : ReleaseStrategy or None
        How tags were to be released, and how they were; None unless this was a release.
    reason : str
        Why in this way.
    """

    name: str
    backend: str
    before_bytes: int
    after_bytes: int
    seconds: float
    differences: tuple[str, ...] = ()
    degraded: bool = False
    planned: ReleaseStrategy | None = None
    strategy: ReleaseStrategy | None = None
    reason: str = ""

    @property
    def intact(self) -> bool:
        """Whether everything was as it has to be."""
        return not self.differences
