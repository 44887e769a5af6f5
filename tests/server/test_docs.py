"""What docs/server.md says is so: its lines of curl, its routes, its fields."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from sleepbackends.server.failures import ErrorReply
from sleepbackends.server.models import ProgressReply, TransitionReply
from tests.gated import make
from tests.server.calling import BASE, Caller

TEXT = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
BLOCKS = [
    block.splitlines()
    for block in re.findall(r"```console\n(.*?)```", TEXT, flags=re.DOTALL)
    if block.startswith("curl")
]


def run(caller: Caller, line: str) -> int:
    """Make the request that one line of curl makes."""
    program, *words = shlex.split(line)
    assert program == "curl"
    method, url, headers, data = "GET", "", {}, None
    while words:
        word = words.pop(0)
        if word == "-X":
            method = words.pop(0)
        elif word == "-H":
            name, value = words.pop(0).split(": ")
            headers[name] = value
        elif word == "-d":
            data = words.pop(0)
        else:
            assert not word.startswith("-"), f"unknown option {word}"
            url = word
    assert url.startswith(BASE)
    return caller(method, url, headers=headers, content=data).status_code


@pytest.mark.parametrize("lines", BLOCKS, ids=lambda lines: lines[0].split("/")[-1])
def test_the_lines_of_curl_work_in_their_order(lines: list[str]) -> None:
    caller = Caller(make()[0])
    for line in lines:
        assert run(caller, line) == 200, line


def test_there_are_lines_for_vllm_for_sglang_and_ours() -> None:
    assert len(BLOCKS) == 3


def test_every_route_is_documented_and_no_other() -> None:
    document = Caller(make()[0]).ok("GET", "/openapi.json")
    real = {
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method in methods
    }
    table = TEXT.split("## Routes")[1].split("`/openapi.json`")[0]
    assert set(re.findall(r"`((?:GET|POST) /\w+)", table)) == real


@pytest.mark.parametrize("model", [TransitionReply, ErrorReply, ProgressReply])
def test_every_field_is_documented(model: type) -> None:
    names = {
        field.serialization_alias or name
        for name, field in model.model_fields.items()  # type: ignore[attr-defined]
    }
    assert {f"`{name}`" for name in names - {"operation", "seconds"}} <= set(
        re.findall(r"`\w+`", TEXT)
    )


def test_the_example_of_an_own_application_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    names: dict[str, Any] = {"orchestrator": make()[0]}
    exec(example, names)  # noqa: S102 - the documentation's own code
    application = names["application"]
    assert isinstance(application, FastAPI)
    assert Caller(application).ok("POST", "/memory/sleep")["changed"]
