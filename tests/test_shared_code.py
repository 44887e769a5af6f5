"""Backends over a device's virtual memory share everything above the driver.

Code that is there twice has lines that are equal, or equal but for the names and values in them.
"""

from __future__ import annotations

import io
import keyword
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import sleepbackends

PACKAGE = Path(sleepbackends.__file__).parent
PAIRS = [("cumem", "xpu")]
LONGEST = 5
"""The most lines in a row that may be equal or of the same shape."""

_LAYOUT = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT}


class Line(NamedTuple):
    """A line of code: where it is, what it says, and its shape."""

    where: str
    text: str
    shape: str


def lines_of(path: Path) -> list[Line]:
    """List what is neither blank nor a comment nor an import: those say what is shared."""
    text = path.read_text()
    shapes: dict[int, list[str]] = {}
    imports: set[int] = set()
    importing = False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            importing = False
        if token.type in _LAYOUT or token.type == tokenize.ENDMARKER:
            continue
        number = token.start[0]
        if number not in shapes and token.string in ("import", "from"):
            importing = True
        if importing:
            imports.add(number)
        shapes.setdefault(number, []).append(_shape(token))
        for more in range(number + 1, token.end[0] + 1):  # of a text over several lines
            shapes.setdefault(more, []).append("text")
    where = path.relative_to(PACKAGE)
    texts = text.splitlines()
    return [
        Line(f"{where}:{number}", texts[number - 1].strip(), " ".join(shape))
        for number, shape in sorted(shapes.items())
        if number not in imports and texts[number - 1].strip()
    ]


def _shape(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.NAME:
        return token.string if keyword.iskeyword(token.string) else "name"
    if token.type == tokenize.NUMBER:
        return "number"
    return token.string if token.type == tokenize.OP else "text"


def _same(one: Line, other: Line) -> bool:
    if one.text == other.text:
        return True
    # Of texts over several lines only the words tell anything.
    return one.shape == other.shape and one.shape != "text"


def longest_runs(one: list[Line], other: list[Line]) -> Iterator[tuple[int, Line, Line]]:
    """Yield the runs of lines that are too long, each with how long it is and where it begins."""
    before = [0] * (len(other) + 1)
    for line in one:
        now = [0] * (len(other) + 1)
        for at, its in enumerate(other):
            if _same(line, its):
                now[at + 1] = before[at] + 1
                if now[at + 1] == LONGEST + 1:
                    yield now[at + 1], line, its
        before = now


def code_of(folder: str) -> list[list[Line]]:
    return [lines_of(path) for path in sorted((PACKAGE / folder).rglob("*.py"))]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_nothing_is_there_twice(first: str, second: str) -> None:
    found = [
        f"{length} lines that end at {line.where} are like those at {its.where}: {line.text}"
        for one in code_of(first)
        for other in code_of(second)
        for length, line, its in longest_runs(one, other)
    ]
    assert not found, "\n".join(found)


def test_a_copy_with_other_names_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above could not fail."""
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    text = "".join(f"a{i} = f{i}(x, {i})\nif a{i}: return 'one'\n" for i in range(3))
    for name, content in (
        ("one.py", text),
        ("other.py", text.replace("a", "b").replace("one", "2")),
    ):
        (tmp_path / name).write_text("import os\n\n" + content)
    one, other = (lines_of(tmp_path / name) for name in ("one.py", "other.py"))
    assert len(one) == LONGEST + 1
    assert list(longest_runs(one, other))
    assert not list(longest_runs(one[1:], other))


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_native_drivers_are_not_the_same_twice(first: str, second: str) -> None:
    """Of the C side, as text: each function is short, and what is long is shared."""
    texts = [
        [line.strip() for line in (PACKAGE / "_native" / name).read_text().splitlines() if line]
        for name in ("driver_cuda.c", "driver_level_zero.c")
    ]
    one, other = ([Line(str(n), text, text) for n, text in enumerate(lines)] for lines in texts)
    assert not list(longest_runs(one, other))


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_neither_names_the_other(first: str, second: str) -> None:
    for folder, absent in ((first, second), (second, first)):
        for path in (PACKAGE / folder).rglob("*.py"):
            assert f"sleepbackends.{absent}" not in path.read_text(), path
