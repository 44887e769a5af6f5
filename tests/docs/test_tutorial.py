"""The tutorial, typed in from the page: an empty folder becomes a backend that passes."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Fence, fences, section, text_of
from tests.packaging.environments import Distributions, environ, run

TUTORIAL = list(fences(section(text_of("writing-a-backend.md"), "From an empty folder")))


def typed(fence: Fence) -> str:
    """Return what somebody who follows the page types for one block of it, as shell."""
    if fence.title:
        return f"cat > {shlex.quote(fence.title)} <<'END-OF-FILE'\n{fence.code}END-OF-FILE\n"
    assert fence.language == "console", f"neither a file nor commands: {fence.code}"
    lines = re.findall(r"^\$ (.*)$", fence.code, flags=re.MULTILINE)
    return "".join(f"{line}\n" for line in lines)


def shown(fence: Fence) -> list[str]:
    """Return the lines that the page says will come out."""
    if fence.language != "console":
        return []
    return [line for line in fence.code.splitlines() if not line.startswith("$ ")]


def test_the_tutorial_gives_a_backend_that_passes(
    tmp_path: Path, distributions: Distributions
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    script = "set -euo pipefail\n" + "".join(map(typed, TUTORIAL))
    known = environ()
    told = environ(
        PATH=f"{Path(sys.executable).parent}:{known['PATH']}",
        # As if this working tree had been published.
        PIP_FIND_LINKS=f"{known.get('PIP_FIND_LINKS', '')} {distributions.wheel.parent}".strip(),
        PIP_CONSTRAINT=str(ROOT / "constraints.txt"),
    )

    said = run("bash", "-c", script, cwd=folder, env=told).stdout

    for line in (line for fence in TUTORIAL for line in shown(fence)):
        assert line in said, f"the page promises {line!r}"
    (passed,) = re.findall(r"^(\d+) passed", said, flags=re.MULTILINE)
    assert int(passed) > 40, "the contract suite ran"


def test_the_page_shows_every_file_and_a_run_of_the_suite() -> None:
    files = {fence.title for fence in TUTORIAL if fence.title}
    assert {"pyproject.toml", "tests/test_contract.py"} <= files
    assert any("pytest" in typed(fence) for fence in TUTORIAL if fence.language == "console")


@pytest.mark.parametrize("name", sorted({fence.title for fence in TUTORIAL if fence.title}))
def test_every_file_is_named_in_the_text_too(name: str) -> None:
    """Where titles of blocks are not shown, a reader has to know what to call it."""
    prose = re.sub(r"^```.*?^```$", "", text_of("writing-a-backend.md"), flags=re.M | re.S)
    assert f"`{name}`" in prose
