"""How a verification under way, and what came of it, looks to a person."""

from __future__ import annotations

from collections.abc import Sequence

from sleepbackends.cli.terminal import Cell, Screen, live, say, say_table
from sleepbackends.verify.results import Outcome, TestCase, TestResult, Verdict, Verification

_STYLES = {Outcome.PASSED: "green", Outcome.FAILED: "red", Outcome.SKIPPED: "yellow"}
_VERDICTS = {Verdict.KEPT: "green", Verdict.BROKEN: "red", Verdict.UNAVAILABLE: "yellow"}


class VerifyScreen(Screen):
    """Shows on standard error which test runs, and each that fails as soon as it has.

    Where progress can be shown, a bar shows how far it is.
    """

    def __init__(self) -> None:
        self._counts = dict.fromkeys(Outcome, 0)
        self._at = ""
        self._part = ""
        self._of_part: dict[str, str] = {}
        super().__init__(live(err=True, below=self._numbers))
        self._live.update("starting", 0, None)

    def collected(self, cases: Sequence[TestCase]) -> None:
        """Learn how much there is to do."""
        self._of_part = {case.name: case.part for case in cases}
        self._live.say(f"{len(cases)} tests")

    def begin(self, name: str) -> None:
        """Show what is being tried; where progress cannot be shown, only which part."""
        part = self._of_part.get(name, "")
        if part != self._part and not self._live.moves:
            self._live.say(part)
        self._part = part
        self._at = f"{part}: {name}"
        self._update()

    def result(self, result: TestResult) -> None:
        """Count it in, and show it if it failed."""
        self._counts[result.outcome] += 1
        self._update()
        if result.outcome is Outcome.FAILED:
            seen = (result.message.splitlines() or [""])[0]
            self._live.say(
                f"  {result.case.promise or 'failed'}: {result.case.name}: {seen}", "red"
            )

    def _update(self) -> None:
        self._live.update(self._at, sum(self._counts.values()), len(self._of_part))

    def _numbers(self) -> Sequence[Sequence[Cell]]:
        return [[(f"{n} {outcome.value}", _STYLES[outcome]) for outcome, n in self._counts.items()]]


def show(verification: Verification) -> None:
    """Write the report of a verification as text."""
    about = verification.about
    head = f"{verification.backend}  from {about['from']}, contract {about['contract']}, "
    say(f"{head}suite {about['suite']}", "bold")
    flags = ", ".join(verification.capabilities) or "nothing"
    say(f"declares {flags}", "dim")
    if verification.results:
        _show_parts(verification)
    if verification.skipped():
        say("not tried:")
        for reason, count in verification.skipped().items():
            say(f"  {count:3} {reason}", "dim")
    for result in verification.failures():
        _show_failure(verification, result)
    if verification.problem:
        say(verification.problem, "red")
    say(verification.summary, _VERDICTS[verification.verdict])
    if verification.availability.hint and not verification.availability:
        say(verification.availability.hint, "dim")


def _show_parts(verification: Verification) -> None:
    rows: list[list[Cell]] = []
    for part in verification.parts():
        counts = verification.counts(part)
        numbers = ((str(counts[o]), _STYLES[o] if counts[o] else "dim") for o in Outcome)
        rows.append([part, *numbers])
    say_table(rows, ("part", *(outcome.value for outcome in Outcome)))


def _show_failure(verification: Verification, result: TestResult) -> None:
    key = result.case.promise
    texts = {promise.key: promise.value for promise in verification.promises()}
    named = f"broken promise [{key}]: {texts[key]}" if key in texts else "failed"
    say(f"\n{named}", "red")
    say(f"  test: {result.case.name}")
    seen = "\n        ".join(result.message.splitlines())
    say(f"  seen: {seen}\n")
