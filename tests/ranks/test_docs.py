"""What docs/ranks.md says is so."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from pathlib import Path
from typing import Any

import sleepbackends
from sleepbackends.ranks import RankGroup
from sleepbackends.ranks.participant import SLACK_S

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "ranks.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_example_in_one_process_runs() -> None:
    names: dict[str, Any] = {"print": lambda *_: None}
    exec(EXAMPLES[0], names)  # noqa: S102 - the documentation's own code
    assert names["report"].released_bytes == 2 << 20
    assert names["orchestrator"].state().serving
    names["orchestrator"].close()


def test_the_other_examples_use_names_that_exist_as_they_are() -> None:
    for example in EXAMPLES[1:]:
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                name = node.func.id
                made = getattr(builtins if hasattr(builtins, name) else sleepbackends, name)
                keywords = {keyword.arg for keyword in node.keywords}
                assert keywords <= inspect.signature(made).parameters.keys()


def test_the_figures_and_names_are_those_of_the_code() -> None:
    assert f"{SLACK_S:.0f} s after the deadline" in TEXT
    for name in re.findall(r"`group\.(\w+)\(\)`", TEXT):
        assert hasattr(RankGroup, name)
    heading = re.search(r"\(performance\.md#(\w+)\)", TEXT)
    assert heading is not None
    headings = re.findall(r"^## (.*)$", (DOCS / "performance.md").read_text("utf-8"), re.MULTILINE)
    assert heading[1] in [title.lower() for title in headings]
