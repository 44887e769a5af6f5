"""The page about writing a backend shows the code of the example, and knows every step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sleepbackends
from sleepbackends.mechanism import Mechanism
from tests.docs.pages import ROOT, Fence, fences, text_of

PAGE = text_of("writing-a-backend.md")
# What has another title is typed in by tests/docs/test_tutorial.py.
EXCERPTS = [fence for fence in fences(PAGE) if fence.title.startswith("examples/")]
STEPS = [name for name, value in vars(Mechanism).items() if callable(value) and name[0] != "_"]
SUITE = "".join(
    path.read_text(encoding="utf-8") for path in Path(sleepbackends.__file__).parent.rglob("*.py")
)


def squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=lambda excerpt: excerpt.title)
def test_code_on_the_page_is_in_the_example(excerpt: Fence) -> None:
    example = (ROOT / excerpt.title).read_text(encoding="utf-8")
    assert excerpt.code.strip()
    assert squeezed(excerpt.code) in squeezed(example)


def test_code_from_several_files_is_shown() -> None:
    assert len({excerpt.title for excerpt in EXCERPTS}) >= 3


@pytest.mark.parametrize("step", STEPS)
def test_every_step_is_explained(step: str) -> None:
    assert re.search(rf"^\| [^|]*`{step}`[^|]*\|", PAGE, flags=re.MULTILINE)


def test_messages_on_the_page_are_what_the_package_says() -> None:
    rows = PAGE.split("| what you see | what it means |")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (.*?) \|", rows, flags=re.MULTILINE)
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    messages = [text for text in quoted if " " in text and "..." not in text]
    assert len(messages) >= 8
    for message in messages:
        assert message in SUITE, f"nothing says {message!r} any more"
