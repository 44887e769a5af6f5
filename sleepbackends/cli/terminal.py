"""What a person sees: lines, tables, and how far something is.

On a terminal rich draws tables and progress, if it is installed (``sleepbackends[rich]``).
Without it, and wherever the output is not a terminal, there are plain lines that say the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import zip_longest
from typing import TypeVar

import click

Cell = str | tuple[str, str]
"""A text, or a text and its style: ``bold``, ``dim``, or the name of a colour."""

ScreenT = TypeVar("ScreenT", bound="Screen")


def say(text: str, style: str = "", *, err: bool = False) -> None:
    """Write a line to standard output, or to standard error."""
    no_color = bool(os.environ.get("NO_COLOR"))
    click.echo(_styled(text, style), err=err, color=False if no_color else None)


def say_table(rows: Sequence[Sequence[Cell]], head: Sequence[str] = ()) -> None:
    """Write rows with aligned columns to standard output; without rows, nothing."""
    if not rows:
        return
    if has_rich():
        from sleepbackends.cli import rich_terminal

        rich_terminal.say_table(rows, head)
        return
    heads = [[(name, "bold") for name in head]] if head else []
    for line in _aligned([*heads, *rows]):
        say(line)


def say_markdown(text: str) -> None:
    """Write Markdown to standard output, laid out where rich can do it."""
    if has_rich():
        from sleepbackends.cli import rich_terminal

        rich_terminal.say_markdown(text)
        return
    click.echo(text, nl=False)


class Live:
    """How far something is, and lines meanwhile; this one shows only the lines.

    Parameters
    ----------
    err : bool
        Whether to write to standard error.
    """

    moves = False
    """Whether what is given to ``update`` can be seen."""

    def __init__(self, *, err: bool) -> None:
        self.err = err

    def start(self) -> None:
        """Begin to show it."""

    def stop(self) -> None:
        """Leave only the lines; also if it was never started."""

    def say(self, text: str, style: str = "") -> None:
        """Write a line."""
        say(text, style, err=self.err)

    def update(self, text: str, done: int, total: int | None) -> None:
        """Say how far it is; any thread may."""


def live(
    *,
    err: bool = False,
    amount: Callable[[int], str] = str,
    below: Callable[[], Sequence[Sequence[Cell]]] = tuple,
) -> Live:
    """Return what shows how far something is, as well as it can be shown here.

    Parameters
    ----------
    err : bool
        Whether to write to standard error.
    amount : callable
        Formats how much is done.
    below : callable
        Returns the rows of a table that is shown as well, as they are at this moment.
    """
    if not has_rich(err=err):
        return Live(err=err)
    from sleepbackends.cli import rich_terminal

    return rich_terminal.RichLive(err, amount, below)


class Screen:
    """Something that is shown live for as long as its scope lasts.

    Parameters
    ----------
    shown : Live
        What shows it.
    """

    def __init__(self, shown: Live) -> None:
        self._live = shown

    def __enter__(self: ScreenT) -> ScreenT:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


def has_rich(*, err: bool = False) -> bool:
    """Tell whether rich is to draw: it is installed, and this is a terminal."""
    return (sys.stderr if err else sys.stdout).isatty() and find_spec("rich") is not None


def text_and_style(cell: Cell) -> tuple[str, str]:
    """Take a cell apart."""
    return (cell, "") if isinstance(cell, str) else cell


def _styled(text: str, style: str) -> str:
    if style in ("bold", "dim"):
        return click.style(text, bold=style == "bold" or None, dim=style == "dim" or None)
    return click.style(text, fg=style) if style else text


def _aligned(rows: Sequence[Sequence[Cell]]) -> Iterator[str]:
    parts = [[text_and_style(cell) for cell in row] for row in rows]
    lines = [(line, style) for row in parts for line, style in _lines(row)]
    widths = [max(map(len, column)) for column in zip(*(line for line, _ in lines), strict=True)]
    for line, styles in lines:
        cells = (
            _styled(text, style) + " " * (width - len(text))
            for text, style, width in zip(line, styles, widths, strict=True)
        )
        yield "  ".join(cells).rstrip()


def _lines(row: Sequence[tuple[str, str]]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield the lines of a row: the texts of its cells may have several."""
    styles = [style for _, style in row]
    texts = [text.splitlines() or [""] for text, _ in row]
    for line in zip_longest(*texts, fillvalue=""):
        yield line, styles
