"""Everything a user can set, call or meet has an entry, and every entry is about such a thing.

Fields of the configuration, hooks and errors are in ``tests/test_docs.py``, metrics in
``tests/metrics/test_docs.py``, routes in ``tests/server/test_docs.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import click
import pytest

from sleepbackends import Capabilities, Registry, errors
from sleepbackends.cli import app
from sleepbackends.config import PREFIX, SleepConfig
from tests.docs.pages import DOCS, ROOT, rows, section, text_of

# Loaded as on a machine without third parties, whatever is installed here.
REGISTRY = Registry.load(environ={f"{PREFIX}DISABLE_PLUGINS": "*"})
OPTIONS = [
    (name, field)
    for name in REGISTRY.specs
    if (model := REGISTRY.options_model(name)) is not None
    for field in model.model_fields
]
COMMANDS = app.commands


def options_text(backend: str) -> str:
    """Return what is said of a backend's options: on its own page, or in its section."""
    own = DOCS / f"{backend}.md"
    return section(text_of("backends.md"), backend) + (
        own.read_text("utf-8") if own.exists() else ""
    )


@pytest.mark.parametrize(("backend", "option"), OPTIONS)
def test_every_option_of_every_backend_has_a_row(backend: str, option: str) -> None:
    assert option in rows(options_text(backend)), (
        f"option {option!r} of {backend!r} has no row | `{option}` | in docs/backends.md, section "
        f"{backend}, nor in docs/{backend}.md"
    )


@pytest.mark.parametrize("backend", REGISTRY.specs)
def test_every_backend_has_a_section_and_no_option_that_is_gone(backend: str) -> None:
    text = section(text_of("backends.md"), backend)
    assert text, f"docs/backends.md has no section '## {backend}'"
    assert set(rows(text)) <= {option for name, option in OPTIONS if name == backend}


@pytest.mark.parametrize("backend", REGISTRY.specs)
def test_the_table_of_flags_is_what_the_backend_declares(backend: str) -> None:
    declared = REGISTRY.declared_capabilities(backend)
    assert declared is not None
    for page in (DOCS / "backends.md", ROOT / "README.md"):
        text = page.read_text(encoding="utf-8")
        head = re.search(r"^\| flag \| (`host` .*) \|$", text, flags=re.MULTILINE)
        assert head is not None
        columns = [re.sub(r"[` ]|\(.*\)", "", cell) for cell in head[1].split(" | ")]
        assert backend in columns, f"{page.name}: the table of flags has no column {backend}"
        for flag in Capabilities.names():
            line = re.search(rf"^\| `{flag}` \| (.*) \|$", text[head.end() :], flags=re.MULTILINE)
            assert line is not None, f"{page.name}: {flag}"
            cell = line[1].split(" | ")[columns.index(backend)]
            said = {"yes": True, "no": False}.get(cell)
            # Anything else is explained there: it depends on an option or on the machine.
            assert said is None or said == getattr(declared, flag), f"{page.name}: {flag}"


@pytest.mark.parametrize("flag", Capabilities.names())
def test_every_flag_says_what_it_means_both_ways(flag: str) -> None:
    text = section(text_of("backends.md"), "Capabilities")
    row = re.search(rf"^\| `{flag}` \| (.+) \| (.+) \|$", text, flags=re.MULTILINE)
    assert row is not None, f"docs/backends.md, Capabilities: no row of {flag}"


def parameters(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        is_argument = isinstance(parameter, click.Argument)
        yield parameter.human_readable_name if is_argument else parameter.opts[0]


def said_of(command: str) -> list[str]:
    return rows(section(text_of("cli.md"), f"`sleepbackends {command}`"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_section_with_each_of_its_options(command: str) -> None:
    assert section(text_of("cli.md"), f"`sleepbackends {command}`"), (
        f"docs/cli.md has no section '## `sleepbackends {command}`'"
    )
    assert set(said_of(command)) == set(parameters(COMMANDS[command])), "docs/cli.md"


def test_no_section_is_about_a_command_that_is_gone() -> None:
    found = re.findall(r"^## `sleepbackends ([\w-]+)`$", text_of("cli.md"), flags=re.MULTILINE)
    assert set(found) == COMMANDS.keys()


def test_every_variable_of_the_environment_has_a_row() -> None:
    from sleepbackends import config

    fields = {f"{PREFIX}{field.upper()}" for field in SleepConfig.model_fields}
    constants = {
        value
        for value in vars(config).values()
        if isinstance(value, str) and value.startswith(PREFIX) and value != PREFIX
    }
    own = {name for name in constants if not name.endswith("_")}
    assert own, "found by their names"
    described = rows(section(text_of("configuration.md"), "Environment variables"))
    assert own <= set(described)
    assert {name for name in described if "<" not in name and "..." not in name} <= own | fields


ERRORS = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.SleepBackendsError)
}


@pytest.mark.parametrize("name", ERRORS)
def test_every_attribute_of_an_error_is_on_its_page(name: str) -> None:
    try:
        attributes = vars(ERRORS[name]("said"))
    except TypeError as error:
        pytest.fail(f"{name} cannot be raised with a message alone: {error}")
    text = text_of("errors.md")
    assert not {each for each in attributes if f"`{each}`" not in text}, "docs/errors.md"


def test_the_page_of_errors_has_a_row_of_each_and_of_no_other() -> None:
    named = {each for each in rows(text_of("errors.md")) if each.endswith("Error")}
    rowed = set(re.findall(r"^\| (`\w+Error`.*?) \|", text_of("errors.md"), flags=re.MULTILINE))
    said: set[Any] = {name for cell in rowed for name in re.findall(r"`(\w+Error)`", cell)}
    assert said | named == ERRORS.keys() - {"SleepBackendsError"}
