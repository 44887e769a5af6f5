"""Nothing exported that is not documented and tested, nothing documented that is not exported."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import sleepbackends
from mkdocs_hooks import public_modules
from sleepbackends.testing import SimulatedBackend
from tests.docs import api
from tests.docs.pages import PAGES, ROOT, fences, text_of

PUBLIC = public_modules()
EXPORTED = {name for names in PUBLIC.values() for name in names}
NAMES = [(module, name) for module, names in PUBLIC.items() for name in names]
READERS = [*PAGES, ROOT / "README.md"]
# About the inside of the package, for those who work on it.
INSIDE = {"architecture.md"}


def test_the_page_of_public_names_is_what_the_code_says() -> None:
    assert text_of("api.md") == api.page(), "run: python -m tests.docs.api > docs/api.md"


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_every_public_name_exists_and_says_what_it_is(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)
    row = re.search(rf"^\| `{name}` \| (.*) \|$", text_of("api.md"), flags=re.MULTILINE)
    assert row is not None
    assert row[1].strip(), f"{module}.{name} has no docstring"


@cache
def used_in_tests() -> set[str]:
    """Every name that a test reads, imports or calls, apart from the tests about documents."""
    found: set[str] = set()
    shipped = ROOT.glob("sleepbackends/testing/contract/*.py")
    for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/*/tests/*.py"), *shipped]:
        if path.is_relative_to(Path(__file__).parent):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.ImportFrom):
                found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_every_public_name_is_used_in_a_test(module: str, name: str) -> None:
    assert name in used_in_tests(), f"no test uses {module}.{name}"


@cache
def defined() -> dict[str, str]:
    """Every class of the package, private ones aside, and where it is."""
    return {
        node.name: path.relative_to(ROOT).as_posix()
        for path in (ROOT / "sleepbackends").rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def code_in(page: Path) -> list[ast.Module]:
    """Parse the Python on a page; on most it is a fragment of what an engine has."""
    text = page.read_text(encoding="utf-8")
    return [ast.parse(f.code) for f in fences(text) if f.language == "python" and not f.title]


@pytest.mark.parametrize("page", READERS, ids=lambda page: page.name)
def test_pages_name_no_class_that_is_not_public(page: Path) -> None:
    if page.name in INSIDE:
        return
    quoted = " ".join(re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")))
    named = set(re.findall(r"(?<![\w.-])[A-Z]\w+(?![\w-])", quoted))
    inside = {name: defined()[name] for name in named & defined().keys() - EXPORTED}
    assert not inside, (
        f"{page.name} speaks of {inside}: put them into the __all__ of their modules, "
        "which makes these public, or say it without"
    )


@pytest.mark.parametrize("page", READERS, ids=lambda page: page.name)
def test_pages_import_public_names_only(page: Path) -> None:
    for tree in code_in(page):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = {node.module: [alias.name for alias in node.names]}
            elif isinstance(node, ast.Import):
                modules = {alias.name: [] for alias in node.names}
            else:
                continue
            for module, names in modules.items():
                if module.split(".")[0] != "sleepbackends":
                    continue
                assert module in PUBLIC, f"{page.name}: {module} has no __all__"
                assert set(names) <= set(PUBLIC[module]), f"{page.name}: from {module}"


def attributes(*owners: type) -> set[str]:
    """Everything an object of one of these classes has, its own attributes included."""
    found = {name for owner in owners for name in dir(owner)}
    for base in {base for owner in owners for base in owner.__mro__}:
        if base.__module__.startswith("sleepbackends"):
            found |= set(re.findall(r"^ +self\.([a-z]\w*)\b.* = ", inspect.getsource(base), re.M))
    return found


# The built-in backends, whatever else is installed here.
REGISTRY = sleepbackends.Registry.load(environ={"SLEEPBACKENDS_DISABLE_PLUGINS": "*"})
CALLED: dict[str, tuple[type, ...]] = {
    "orchestrator": (sleepbackends.Orchestrator, sleepbackends.AsyncOrchestrator),
    "backend": (SimulatedBackend, *map(REGISTRY.load_class, REGISTRY.specs)),
}


@pytest.mark.parametrize("variable", CALLED)
@pytest.mark.parametrize("page", READERS, ids=lambda page: page.name)
def test_pages_call_what_is_there(page: Path, variable: str) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = [fence.code for fence in fences(text) if fence.language == "python"]
    code = "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", text)])
    called = set(re.findall(rf"(?<![\w.]){variable}\.(?!(?:py|md|toml)\b)([a-z]\w*)", code))
    known = attributes(*CALLED[variable])
    assert called <= known, f"{page.name}: {variable} has no {called - known}"
