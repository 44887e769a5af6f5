"""What the site needs besides the pages of ``docs/``, which read as well where they lie.

A link to a file of this repository outside ``docs/`` is checked and becomes plain text: the
site does not have that file. A page of reference is made for each public module.
"""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(?:#[^)]*)?\)")

# Below the logger of MkDocs, so that a warning fails a strict build.
logger = logging.getLogger("mkdocs.hooks.sleepbackends")


def public_modules() -> dict[str, list[str]]:
    """Return the public modules and what each exports: those that define ``__all__``."""
    found = {}
    for path in sorted((ROOT / "sleepbackends").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found[module.removesuffix(".__init__")] = list(ast.literal_eval(node.value))
    return found


def on_config(config: MkDocsConfig) -> None:
    """List the pages of reference in the last section."""
    (pages,) = (config.nav or [])[-1].values()
    pages.extend(
        {module.removeprefix("sleepbackends."): f"reference/{module}.md"}
        for module in public_modules()
    )


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages of reference."""
    from mkdocs.structure.files import File

    for module, names in public_modules().items():
        text = f"# {module}\n" + "".join(
            f"\n::: {module}.{name}\n" for name in sorted(names) if not name.startswith("_")
        )
        files.append(File.generated(config, f"reference/{module}.md", content=text))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Check links that lead out of ``docs/``, and leave their text."""

    def plain(link: re.Match[str]) -> str:
        if not (ROOT / "docs" / link[2]).exists():
            logger.warning("%s links to %s, which is not there", page.file.src_path, link[2])
        return link[1]

    return OUTSIDE.sub(plain, markdown)
