"""What is said of the xpu backend is said in the same words everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from sleepbackends.registry import Registry
from tests.docs.pages import DOCS, ROOT

WORDS = (
    "exercised through Intel's real loader against a simulated driver, never on an Intel GPU by us"
)


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CHANGELOG.md", DOCS / "backends.md", DOCS / "xpu.md"],
    ids=lambda page: page.name,
)
def test_a_page_says_so(page: Path) -> None:
    assert WORDS in " ".join(page.read_text(encoding="utf-8").split())


def test_the_list_of_backends_says_so() -> None:
    assert WORDS in Registry.load().get("xpu").spec.summary
