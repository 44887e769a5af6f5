"""The pages of the documentation, and what tests ask about them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))

_FENCE = re.compile(r'^```(\w*)(?: title="([^"\n]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


class Fence(NamedTuple):
    """A block of code on a page, and the file it is said to be in."""

    language: str
    title: str
    code: str


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def fences(text: str) -> Iterator[Fence]:
    for language, title, code in _FENCE.findall(text):
        yield Fence(language, title, code)


def section(text: str, heading: str) -> str:
    """Return what is below a heading, up to the next one of its level or above; or nothing."""
    found = re.search(rf"^(#+) {re.escape(heading)}$\n", text, flags=re.MULTILINE)
    if found is None:
        return ""
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, flags=re.MULTILINE)
    return rest[: end.start()] if end else rest


def rows(text: str) -> list[str]:
    """Return the names in the first column of the tables: ```| `name` |```."""
    return [
        name
        for cell in re.findall(r"^\| (`[^|]*`) \|", text, flags=re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", cell)
    ]
