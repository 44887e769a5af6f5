"""The page about testing a backend knows every promise, assumption, part, option and fixture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import sleepbackends.testing
from sleepbackends.cli import app
from sleepbackends.scaffold.package import FILES
from sleepbackends.testing import Promise, SimulatedDevice, pytest_plugin
from sleepbackends.testing.contract.fixtures import ASSUMPTIONS
from sleepbackends.testing.device import CALLS
from sleepbackends.testing.suite import MIXINS
from tests import public_surface

PAGE = (Path(__file__).parents[1] / "docs" / "testing-a-backend.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """Return the rows of the table that has this first cell in its head."""
    text = PAGE.split(f"\n| {heading} |")[1].split("\n\n")[0]
    return [re.split(r" ?\| ?", line.strip("| ")) for line in text.splitlines()[2:]]


def first_cells(heading: str) -> list[str]:
    return [re.sub("`", "", row[0]) for row in table(heading)]


def test_every_promise_is_quoted() -> None:
    assert [(row[0], row[1]) for row in table("promise")] == [
        (f"`{promise.key}`", promise.value) for promise in Promise
    ]


def test_every_assumption_and_part_is_there_and_no_other() -> None:
    assert first_cells("attribute") == list(ASSUMPTIONS)
    parts = [(row[0].strip("`"), row[1].strip("`")) for row in table("part")]
    assert parts == [(name, part.__name__) for name, part in MIXINS.items()]


def test_every_option_of_the_command_is_there() -> None:
    options = [
        each.opts[0] for each in app.commands["verify"].params if each.param_type_name == "option"
    ]
    said = " ".join(row[0] for row in table("option"))
    for option in options:
        assert f"`{option}" in said
    assert len(re.findall("`--", said)) == len(options)


def test_every_fixture_is_there() -> None:
    fixtures = [
        path.rpartition(".")[2]
        for path in public_surface.public()
        if path.startswith(f"{pytest_plugin.__name__}.")
    ]
    assert sorted(first_cells("fixture")) == sorted(set(fixtures) - {"pytest_configure"})


def test_every_file_of_a_new_package_is_there() -> None:
    said = " ".join(first_cells("in it"))
    for path in FILES:
        name = path.rpartition("/")[2]
        if path.startswith("{package}") and name not in ("__init__.py", "py.typed"):
            assert name in said


def test_every_call_of_the_device_is_there() -> None:
    (line,) = re.findall(r"Its calls are (.*?)\. Backends", PAGE, flags=re.DOTALL)
    assert tuple(re.findall(r"`(\w+)`", line)) == CALLS


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
def test_the_code_runs(code: str) -> None:
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - the page's own code
    if "device" in names:
        assert isinstance(names["device"], SimulatedDevice)
    else:
        assert names["MyBackendTests"].backend_name == "mybackend"


def test_names_on_the_page_are_public() -> None:
    for name in re.findall(r"`(\w+Tests|Simulated\w+|FaultInjector|FakeEngine|hold_step)`", PAGE):
        if name != "MyBackendTests":
            assert name in sleepbackends.testing.__all__


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", PAGE))
def test_links_lead_somewhere(target: str) -> None:
    assert (Path(__file__).parents[1] / "docs" / target).exists()
