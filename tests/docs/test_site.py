"""What the site does to pages, and what pages have to be to read well in a repository too."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mkdocs_hooks
from tests.docs.pages import PAGES, ROOT, fences, text_of

PAGE: Any = SimpleNamespace(file=SimpleNamespace(src_path="page.md"))
EVERYWHERE = [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md")]


def test_a_link_out_of_the_pages_keeps_its_text() -> None:
    text = "see [`README`](../README.md#documentation) and [errors](errors.md)"
    assert mkdocs_hooks.on_page_markdown(text, page=PAGE) == "see `README` and [errors](errors.md)"


def test_a_link_to_nothing_is_a_warning_of_mkdocs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        mkdocs_hooks.on_page_markdown("[gone](../examples/gone.py)", page=PAGE)
    (record,) = caplog.records
    assert record.name.startswith("mkdocs."), "what is logged elsewhere fails no strict build"
    assert "../examples/gone.py" in record.getMessage()


@pytest.mark.parametrize("page", EVERYWHERE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_files_lead_somewhere(page: Path) -> None:
    """As in a repository: the strict build sees to those between the pages of the site."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\((?!\w+:|#)([^)#]+)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_uses_only_what_renders_in_both_places(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.match(r"# \S", text), "begins with its title"
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"^# ", outside, flags=re.MULTILINE)) == 1, "has one title"
    assert not re.search(r"^(?:!!!|\?\?\?|:::|===) ", outside, flags=re.MULTILINE)
    assert "](/" not in outside, "no link from the root"
    assert "`" * 3 not in outside, 'a fence that is not understood: ```lang title="file"'


def test_getting_started_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for fence in fences(text_of("getting-started.md")):
        if fence.language == "python":
            exec(fence.code, names)  # noqa: S102 - the documentation's own code
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [f"{5 << 20} weights_offloaded", "b'wwww' True"]
    assert said[2:4] == ["selective False", "selective False"]
    assert said[-1] == "go on"
    assert "never reached" not in said


def test_every_failure_that_people_report_has_a_reference() -> None:
    text = text_of("faq.md").split("## Not covered")[0]
    entries = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    assert len(entries) > 30
    for entry in entries:
        title = entry.splitlines()[0]
        assert re.search(r"^Reports?: \[[\w#.-]+\]\(https://github\.com/", entry, flags=re.M), title
    references = re.findall(r"\((https://github\.com/[^)]*)\)", text_of("faq.md"))
    assert len(references) == len(set(references)), "each report is in one place"
    for reference in references:
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", reference)
