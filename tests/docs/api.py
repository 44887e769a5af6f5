"""The page of public names, from the code: ``python -m tests.docs.api > docs/api.md``."""

from __future__ import annotations

import griffe

from mkdocs_hooks import public_modules

HEAD = """\
# Public names

A module is public if it defines `__all__`, and what that names is what you may build on;
[compatibility](compatibility.md) says what that means. This page is written by a program
(`python -m tests.docs.api > docs/api.md`), and a test compares it with the code. The site has
the signatures too.
"""


def summary(item: griffe.Object | griffe.Alias) -> str:
    """Return the first sentence of a docstring, as Markdown."""
    said = item.docstring.value if item.docstring else ""
    return said.split("\n\n")[0].replace("\n", " ").replace("``", "`").replace("|", r"\|")


def page() -> str:
    """Return the text of the page."""
    package = griffe.load("sleepbackends")
    parts = [HEAD]
    for module, names in public_modules().items():
        path = module.removeprefix("sleepbackends").removeprefix(".")
        found = package[path] if path else package
        rows = [f"| `{name}` | {summary(found[name])} |" for name in names]
        parts.append(
            f"## `{module}`\n\n{summary(found)}\n\n| name | what it is |\n|---|---|\n"
            + "\n".join(rows)
            + "\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201 - that is what it is for
