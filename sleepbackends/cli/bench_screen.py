"""How a benchmark under way looks to a person."""

from __future__ import annotations

from statistics import median
from types import TracebackType

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from sleepbackends.bench.request import Spec
from sleepbackends.bench.rows import Row
from sleepbackends.bench.tables import seconds_text
from sleepbackends.cli.output import console


class BenchScreen:
    """Shows on standard error what is being measured, and what came out of it.

    There is a line when a process begins and one for each case when it has ended; on a
    terminal its rows are shown as they come.
    """

    def __init__(self) -> None:
        self._out = console(stderr=True)
        self._seconds: dict[str, list[float]] = {}
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._out,
        )
        self._bar = self._bars.add_task("looking at the machine", total=None)
        self._live = Live(
            console=self._out,
            get_renderable=self._render,
            transient=True,
            auto_refresh=self._out.is_terminal,
        )

    def __enter__(self) -> BenchScreen:
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

    def begin(self, spec: Spec, number: int, count: int) -> None:
        """Show what is being measured."""
        self._seconds = {}
        self._bars.update(self._bar, description=spec.title, completed=number - 1, total=count)
        self._say(f"{number} of {count}: {spec.title}", "bold")

    def row(self, row: Row) -> None:
        """Count a measurement in."""
        case = row.case if row.devices == "0" else f"{row.case}, devices {row.devices}"
        name = f"{row.peer} {case}"
        self._seconds.setdefault(name, []).append(row.seconds)

    def end(self, spec: Spec, problem: str) -> None:
        """Show the medians, and what went wrong."""
        self._bars.advance(self._bar)
        measured, self._seconds = self._seconds, {}
        for name, values in measured.items():
            self._say(f"  {name}: {seconds_text(median(values))} s, median of {len(values)}")
        if problem:
            self._say(f"  not to the end: {problem}", "red")

    def _say(self, text: str, style: str = "") -> None:
        self._out.print(Text(text, style=style), soft_wrap=True)

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_row("", *(Text(head, "dim") for head in ("last s", "median s", "rows")))
        for name, values in list(self._seconds.items()):  # rows come meanwhile
            figures = (seconds_text(values[-1]), seconds_text(median(values)), str(len(values)))
            table.add_row(f"  {name}", *figures)
        return Group(table, self._bars) if self._seconds else self._bars
