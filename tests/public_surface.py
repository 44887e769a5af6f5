"""The public surface, written down line by line.

``python -m tests.public_surface --write`` writes it to ``public_surface.txt``. Do so when it is
meant to change, and read the difference: a line that goes or changes may break somebody.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mkdocs_hooks import public_modules

FROZEN = Path(__file__).with_suffix(".txt")

FIXTURES = "sleepbackends.testing.pytest_plugin"
"""The pytest plugin, whose fixtures are public."""

HOOKS = "sleepbackends.hookspecs"
"""What plugins may implement."""


def public() -> dict[str, Any]:
    """Return everything public, by its dotted path: what modules name in ``__all__``, and more."""
    found: dict[str, Any] = {}
    for name, exported in public_modules().items():
        module = importlib.import_module(name)
        found |= {f"{name}.{each}": getattr(module, each) for each in exported}
    for name, is_public in ((FIXTURES, _is_public_fixture), (HOOKS, _is_hook)):
        members = vars(importlib.import_module(name)).items()
        found |= {f"{name}.{each}": value for each, value in members if is_public(each, value)}
    found.pop("sleepbackends.__version__")
    return dict(sorted(found.items()))


def surface() -> Iterator[str]:
    """List the public surface, sorted."""
    names = public()
    classes = {value for value in names.values() if inspect.isclass(value)}
    for path, value in names.items():
        if _is_fixture(value):
            yield f"fixture {path}"
        elif inspect.isclass(value):
            yield from _class(path, value, classes)
        elif inspect.isroutine(value):
            yield f"{path}{_signature(value)}"
        else:
            shown = f" = {value!r}" if isinstance(value, (str, int, float)) else ""
            yield f"{path}: {type(value).__name__}{shown}"
    yield from _commands()


def text() -> str:
    """Return the surface as it is written down."""
    return "".join(f"{line}\n" for line in surface())


def _is_fixture(value: Any) -> bool:
    # A class of its own since pytest 8.4, a marked function before.
    return type(value).__module__.startswith("_pytest") or hasattr(value, "_pytestfixturefunction")


def _is_public_fixture(name: str, value: Any) -> bool:
    return not name.startswith("_") and _is_fixture(value)


def _is_hook(name: str, value: Any) -> bool:
    return name.startswith("sleepbackends_") and callable(value)


def _class(path: str, cls: type[Any], classes: set[type[Any]]) -> Iterator[str]:
    yield f"class {path}({', '.join(base.__name__ for base in cls.__bases__)})"
    fields = list(_fields(cls))
    yield from (f"  {line}" for line in fields)
    # What a public base has is listed there.
    owners = [each for each in cls.__mro__ if each is cls or each not in classes]
    members: dict[str, Any] = {}
    for owner in reversed(owners):
        if owner.__module__.startswith("sleepbackends"):
            members |= vars(owner)
    named = {re.split(r"\W", line)[0] for line in fields}
    for name in sorted(members.keys() - named - {"model_config"}):
        if name == "__init__" and not named:
            yield f"  __init__{_signature(members[name])}"
        elif not name.startswith("_"):
            yield f"  {_member(name, members[name])}"


def _member(name: str, value: Any) -> str:
    if isinstance(value, (classmethod, staticmethod)):
        return f"{name}{_signature(value.__func__)} ({type(value).__name__})"
    if isinstance(value, property):
        kind = value.fget.__annotations__.get("return", "Any") if value.fget else "Any"
        return f"{name}: {kind} (property)"
    return f"{name}{_signature(value)}" if inspect.isroutine(value) else name


def _fields(cls: type[Any]) -> Iterator[str]:
    if issubclass(cls, Enum):
        for member in cls:
            yield f"{member.name} = {member.value!r}"
    elif issubclass(cls, BaseModel):
        for name, model_field in cls.model_fields.items():
            default = "required" if model_field.is_required() else repr(model_field.default)
            yield f"{name}: {default}"
    elif dataclasses.is_dataclass(cls):
        for each in dataclasses.fields(cls):
            required = each.default is each.default_factory is dataclasses.MISSING
            yield f"{each.name}: {each.type}{' (required)' if required else ''}"


def _signature(function: Any) -> str:
    return str(inspect.signature(function)).replace("'", "")


def _commands() -> Iterator[str]:
    from sleepbackends.cli import app

    for name, command in sorted(app.commands.items()):
        parameters = sorted(
            "/".join(each.opts) if each.param_type_name == "option" else str(each.name).upper()
            for each in command.params
        )
        yield f"$ sleepbackends {name} {' '.join(parameters)}".rstrip()


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        FROZEN.write_text(text(), encoding="utf-8")
    else:
        sys.stdout.write(text())
