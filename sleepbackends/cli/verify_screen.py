"""How a verification under way, and what came of it, looks to a person."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from sleepbackends.cli.output import console
from sleepbackends.verify.results import Outcome, TestCase, TestResult, Verdict, Verification

_STYLES = {Outcome.PASSED: "green", Outcome.FAILED: "red", Outcome.SKIPPED: "yellow"}
_VERDICTS = {Verdict.KEPT: "green", Verdict.BROKEN: "red", Verdict.UNAVAILABLE: "yellow"}


class VerifyScreen:
    """Shows on standard error which test runs, and each that fails as soon as it has.

    On a terminal a bar shows how far it is.
    """

    def __init__(self) -> None:
        self._out = console(stderr=True)
        self._counts = dict.fromkeys(Outcome, 0)
        self._part = ""
        self._of_part: dict[str, str] = {}
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._out,
        )
        self._bar = self._bars.add_task("starting", total=None)
        self._live = Live(
            console=self._out,
            get_renderable=self._render,
            transient=True,
            auto_refresh=self._out.is_terminal,
        )

    def __enter__(self) -> VerifyScreen:
        if self._out.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def collected(self, cases: Sequence[TestCase]) -> None:
        """Learn how much there is to do."""
        self._of_part = {case.name: case.part for case in cases}
        self._bars.update(self._bar, total=len(cases))
        if not self._out.is_terminal:
            self._say(f"{len(cases)} tests")

    def begin(self, name: str) -> None:
        """Show what is being tried; without a terminal, only which part."""
        part = self._of_part.get(name, "")
        if part != self._part and not self._out.is_terminal:
            self._say(part)
        self._part = part
        self._bars.update(self._bar, description=f"{part}: {name}")

    def result(self, result: TestResult) -> None:
        """Count it in, and show it if it failed."""
        self._counts[result.outcome] += 1
        self._bars.advance(self._bar)
        if result.outcome is Outcome.FAILED:
            seen = (result.message.splitlines() or [""])[0]
            self._say(f"  {result.case.promise or 'failed'}: {result.case.name}: {seen}", "red")

    def _say(self, text: str, style: str = "") -> None:
        self._out.print(Text(text, style=style), soft_wrap=True)

    def _render(self) -> RenderableType:
        numbers = Text(", ").join(
            Text(f"{count} {outcome.value}", _STYLES[outcome])
            for outcome, count in self._counts.items()
        )
        return Group(self._bars, numbers)


def show(verification: Verification, out: Console) -> None:
    """Write the report of a verification as text."""
    about = verification.about
    head = f"{verification.backend}  from {about['from']}, contract {about['contract']}, "
    out.print(Text(f"{head}suite {about['suite']}", "bold"), soft_wrap=True)
    flags = ", ".join(verification.capabilities) or "nothing"
    out.print(Text(f"declares {flags}", "dim"), soft_wrap=True)
    if verification.results:
        out.print(_parts(verification))
    if verification.skipped():
        out.print("not tried:")
        for reason, count in verification.skipped().items():
            out.print(Text(f"  {count:3} {reason}", "dim"), soft_wrap=True)
    for result in verification.failures():
        _show_failure(verification, result, out)
    if verification.problem:
        out.print(Text(verification.problem, "red"), soft_wrap=True)
    out.print(Text(verification.summary, _VERDICTS[verification.verdict]), soft_wrap=True)
    if verification.availability.hint and not verification.availability:
        out.print(Text(verification.availability.hint, "dim"), soft_wrap=True)


def _parts(verification: Verification) -> Table:
    table = Table("part", *(outcome.value for outcome in Outcome), show_edge=False)
    for part in verification.parts():
        counts = verification.counts(part)
        table.add_row(
            part,
            *(
                Text(str(counts[outcome]), _STYLES[outcome] if counts[outcome] else "dim")
                for outcome in Outcome
            ),
        )
    return table


def _show_failure(verification: Verification, result: TestResult, out: Console) -> None:
    key = result.case.promise
    texts = {promise.key: promise.value for promise in verification.promises()}
    named = f"broken promise [{key}]: {texts[key]}" if key in texts else "failed"
    out.print(Text(f"\n{named}", "red"), soft_wrap=True)
    out.print(Text(f"  test: {result.case.name}"), soft_wrap=True)
    seen = "\n        ".join(result.message.splitlines())
    out.print(Text(f"  seen: {seen}\n"), soft_wrap=True)
