"""The page about writing a backend shows the code of the example, and knows every step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sleepbackends
from sleepbackends.mechanism import Mechanism

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "sleepbackends-zstd"
PAGE = (ROOT / "docs" / "writing-a-backend.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|toml)(.*)\n((?:.*\n)*?)```$", PAGE, flags=re.MULTILINE)
STEPS = [name for name, value in vars(Mechanism).items() if callable(value) and name[0] != "_"]
SUITE = "".join(
    path.read_text(encoding="utf-8") for path in Path(sleepbackends.__file__).parent.rglob("*.py")
)


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_there_is_code_of_every_file_that_a_backend_needs() -> None:
    shown = {file.strip() for _, file, _ in BLOCKS}
    assert {"pyproject.toml", "tests/test_contract.py"} <= shown
    package = EXAMPLE / "sleepbackends_zstd"
    written = {f"{package.name}/{path.name}" for path in package.glob("*.py")}
    assert written - {"sleepbackends_zstd/__init__.py"} <= shown


@pytest.mark.parametrize(("file", "code"), [(file.strip(), code) for _, file, code in BLOCKS])
def test_code_on_the_page_is_in_the_example(file: str, code: str) -> None:
    assert file, f"a block does not say which file it is from: {code}"
    assert code.strip()
    assert squeezed(code) in squeezed((EXAMPLE / file).read_text(encoding="utf-8"))


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


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", PAGE))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / "docs" / target).exists()
