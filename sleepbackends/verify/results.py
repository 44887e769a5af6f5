"""What came of a verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from sleepbackends.availability import Availability
from sleepbackends.testing.promises import Promise


class Outcome(str, Enum):
    """What became of one test."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class Verdict(str, Enum):
    """What became of all of them."""

    KEPT = "kept"
    BROKEN = "broken"
    UNAVAILABLE = "unavailable"
    """The backend cannot work on this machine, so nothing was tried."""


@dataclass(frozen=True)
class TestCase:
    """One test that was collected.

    Parameters
    ----------
    name : str
        With its parameters, such as ``test_suspend[save]``.
    part : str
        The part of the suite it belongs to; ``own`` for a test that the backend brings.
    promise : str
        The key of the promise it proves; empty where it names none.
    """

    __test__ = False  # pytest would take it for a test class

    name: str
    part: str
    promise: str = ""


@dataclass(frozen=True)
class TestResult:
    """One test and what became of it.

    Parameters
    ----------
    case : TestCase
        Which test. A failure may name another promise than the test does.
    outcome : Outcome
        What became of it.
    seconds : float
        How long it took.
    message : str
        What was seen instead of what is promised, or why it was skipped.
    details : str
        Where that was.
    tried : sequence of str
        If it passed: the keys of the promises that it found to be kept, the one it proves and
        those of its checks.
    """

    __test__ = False  # as above

    case: TestCase
    outcome: Outcome
    seconds: float = 0.0
    message: str = ""
    details: str = ""
    tried: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Everything there is to report.

    Parameters
    ----------
    backend : str
        Its name.
    options : mapping of str to object
        What it was created with.
    availability : Availability
        What its probe says of this machine.
    about : mapping of str to str
        Versions, and the machine.
    capabilities : tuple of str
        The flags that the class declares True.
    results : sequence of TestResult
        In the order in which they came.
    problem : str
        Why the suite did not come to its end; empty if it did.
    seconds : float
        How long it took.
    """

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    availability: Availability
    about: Mapping[str, str] = field(default_factory=dict)
    capabilities: tuple[str, ...] = ()
    results: Sequence[TestResult] = ()
    problem: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """Kept only if every test came to its end and none failed."""
        if not self.availability:
            return Verdict.UNAVAILABLE
        counts = self.counts()
        kept = counts[Outcome.PASSED] and not counts[Outcome.FAILED] and not self.problem
        return Verdict.KEPT if kept else Verdict.BROKEN

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        if self.verdict is Verdict.UNAVAILABLE:
            return f"{self.backend} cannot be verified here: {self.availability.reason}"
        counts = self.counts()
        numbers = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome)
        said = {
            Verdict.KEPT: f"{self.backend} keeps its promises here",
            Verdict.BROKEN: f"{self.backend} does not keep its promises here",
        }
        return f"{said[self.verdict]}: {numbers} in {self.seconds:.1f} s"

    def counts(self, part: str | None = None) -> Counter[Outcome]:
        """Count the outcomes, of one part or of all."""
        return Counter(r.outcome for r in self.results if part in (None, r.case.part))

    def parts(self) -> tuple[str, ...]:
        """List the parts of the suite there are results of, in order."""
        return tuple(dict.fromkeys(result.case.part for result in self.results))

    def failures(self) -> list[TestResult]:
        """List what failed."""
        return [result for result in self.results if result.outcome is Outcome.FAILED]

    def skipped(self) -> dict[str, int]:
        """Count what was skipped, by reason."""
        reasons = Counter(r.message for r in self.results if r.outcome is Outcome.SKIPPED)
        return dict(reasons.most_common())

    def promises(self) -> dict[Promise, Outcome]:
        """Tell of each promise whether it was kept, broken, or not tried (skipped)."""
        failed = {r.case.promise for r in self.results if r.outcome is Outcome.FAILED}
        tried = {key for r in self.results for key in r.tried}
        outcomes = dict.fromkeys(Promise, Outcome.SKIPPED)
        outcomes |= {promise: Outcome.PASSED for promise in Promise if promise.key in tried}
        outcomes |= {promise: Outcome.FAILED for promise in Promise if promise.key in failed}
        return outcomes

    def to_json(self) -> dict[str, Any]:
        """Return everything as it is written to a JSON file."""
        return {
            "backend": self.backend,
            "options": dict(self.options),
            "verdict": self.verdict.value,
            "summary": self.summary,
            "available": asdict(self.availability),
            "about": dict(self.about),
            "capabilities": list(self.capabilities),
            "problem": self.problem,
            "seconds": self.seconds,
            "promises": {
                promise.key: {"text": promise.value, "outcome": outcome.value}
                for promise, outcome in self.promises().items()
            },
            "results": [
                {
                    **asdict(result.case),
                    "outcome": result.outcome.value,
                    "seconds": result.seconds,
                    "message": result.message,
                    "details": result.details,
                    "tried": list(result.tried),
                }
                for result in self.results
            ],
        }
