"""How a benchmark under way looks to a person."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from sleepbackends.bench.request import Spec
from sleepbackends.bench.rows import Row
from sleepbackends.bench.tables import seconds_text
from sleepbackends.cli.terminal import Cell, Screen, live

_HEAD: list[Cell] = ["", ("last s", "dim"), ("median s", "dim"), ("rows", "dim")]


class BenchScreen(Screen):
    """Shows on standard error what is being measured, and what came out of it.

    There is a line when a process begins and one for each case when it has ended. Where
    progress can be shown, its rows are shown as they come.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}
        self._number = self._count = 0
        super().__init__(live(err=True, below=self.figures))
        self._live.update("looking at the machine", 0, None)

    def begin(self, spec: Spec, number: int, count: int) -> None:
        """Show what is being measured."""
        self._seconds = {}
        self._number, self._count = number, count
        self._live.update(spec.title, number - 1, count)
        self._live.say(f"{number} of {count}: {spec.title}", "bold")

    def row(self, row: Row) -> None:
        """Count a measurement in."""
        case = row.case if row.devices == "0" else f"{row.case}, devices {row.devices}"
        name = f"{row.peer} {case}"
        self._seconds.setdefault(name, []).append(row.seconds)

    def end(self, spec: Spec, problem: str) -> None:
        """Show the medians, and what went wrong."""
        self._live.update(spec.title, self._number, self._count)
        measured, self._seconds = self._seconds, {}
        for name, values in measured.items():
            self._live.say(f"  {name}: {seconds_text(median(values))} s, median of {len(values)}")
        if problem:
            self._live.say(f"  not to the end: {problem}", "red")

    def figures(self) -> Sequence[Sequence[Cell]]:
        """Return what was measured so far of what is being measured, as a table."""
        measured = list(self._seconds.items())  # rows come meanwhile
        rows: list[list[Cell]] = [
            [f"  {name}", seconds_text(values[-1]), seconds_text(median(values)), str(len(values))]
            for name, values in measured
        ]
        return [_HEAD, *rows] if rows else []
