from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from sleepbackends import Capabilities, EngineHooks, SleepBackendsError, errors, hookspecs
from sleepbackends.config import SleepConfig
from sleepbackends.hookspecs import PROJECT_NAME

DOCS = Path(__file__).parents[1] / "docs"
HOOKS = [name for name in vars(hookspecs) if name.startswith(f"{PROJECT_NAME}_")]


def headings(page: str) -> set[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return set(re.findall(r"^#+ `(\w+)`$", text, flags=re.MULTILINE))


@pytest.mark.parametrize("field", SleepConfig.model_fields)
def test_every_configuration_field_has_a_heading_and_a_description(field: str) -> None:
    assert field in headings("configuration.md")
    assert SleepConfig.model_fields[field].description


def test_no_heading_describes_a_field_that_is_gone() -> None:
    assert headings("configuration.md") <= SleepConfig.model_fields.keys()


def test_there_are_hooks_to_document() -> None:
    assert "sleepbackends_register_backends" in HOOKS


@pytest.mark.parametrize("hook", HOOKS)
def test_every_plugin_hook_has_a_heading(hook: str) -> None:
    assert hook in headings("hooks.md")


@pytest.mark.parametrize("hook", [field.name for field in fields(EngineHooks)])
def test_every_engine_hook_has_a_heading_and_a_docstring(hook: str) -> None:
    assert hook in headings("hooks.md")
    assert EngineHooks.__doc__ is not None
    assert f"\n    {hook} : " in EngineHooks.__doc__


def error_names() -> list[str]:
    return [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, SleepBackendsError)
    ]


@pytest.mark.parametrize("name", error_names())
def test_every_error_is_documented_with_its_guarantee(name: str) -> None:
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    assert f"`{name}`" in text


@pytest.mark.parametrize("flag", Capabilities.names())
def test_every_capability_is_in_the_readme(flag: str) -> None:
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert f"| `{flag}` |" in text


def test_the_example_in_the_readme_runs() -> None:
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(example.splitlines()) <= 15
    names: dict[str, Any] = {}
    exec(example, names)  # noqa: S102 - the README's own code
    assert names["report"].changed
    assert names["orchestrator"].state().serving
    names["orchestrator"].close()
