"""What rich draws on a terminal; imported only where rich is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.markdown import Markdown
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from sleepbackends.cli.terminal import Cell, Live, text_and_style


def say_table(rows: Sequence[Sequence[Cell]], head: Sequence[str]) -> None:
    """Write rows as a table whose cells are wrapped to the width of the terminal."""
    table = Table(*head, show_edge=False) if head else Table.grid(padding=(0, 2))
    _fill(table, rows)
    Console().print(table)


def say_markdown(text: str) -> None:
    """Write Markdown, laid out."""
    Console().print(Markdown(text))


class RichLive(Live):
    """A bar below the lines, and a table above the bar.

    Parameters
    ----------
    err : bool
        Whether to write to standard error.
    amount : callable
        Formats how much is done.
    below : callable
        Returns the rows of the table.
    """

    moves = True

    def __init__(
        self,
        err: bool,
        amount: Callable[[int], str],
        below: Callable[[], Sequence[Sequence[Cell]]],
    ) -> None:
        super().__init__(err=err)
        self._amount = amount
        self._below = below
        self._console = Console(stderr=err)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[amount]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._bar = self._bars.add_task("", visible=False, amount="")
        self._screen = Screen(console=self._console, get_renderable=self._render, transient=True)

    def start(self) -> None:
        """Begin to show it."""
        self._screen.start()

    def stop(self) -> None:
        """Leave only the lines."""
        self._screen.stop()

    def say(self, text: str, style: str = "") -> None:
        """Write a line above what moves."""
        self._console.print(Text(text, style), soft_wrap=True)

    def update(self, text: str, done: int, total: int | None) -> None:
        """Move the bar; it goes when everything is done."""
        said = "" if total is None else f"{self._amount(done)} of {self._amount(total)}"
        self._bars.update(
            self._bar,
            description=text,
            completed=done,
            total=total,
            amount=said,
            visible=total is None or done < total,
        )

    def _render(self) -> RenderableType:
        rows = self._below()
        if not rows:
            return self._bars
        table = Table.grid(padding=(0, 2))
        _fill(table, rows)
        return Group(table, self._bars)


def _fill(table: Table, rows: Sequence[Sequence[Cell]]) -> None:
    for row in rows:
        table.add_row(*(Text(*text_and_style(cell)) for cell in row))
