"""The example of two models: it runs on any machine, and it notices when something goes wrong."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_models_one_gpu.py"


@pytest.fixture
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


class Engine:
    """In the place of one in a process of its own."""

    def __init__(self, name: str, awake: list[str]) -> None:
        self.name = self.says = name
        self.awake = awake
        self.forgets = False
        self.has_room = True

    def call(self, method: str, *arguments: Any, timeout_s: float = 0) -> Any:
        answer: Any = getattr(self, method)(*arguments)
        return answer

    def start(self) -> str:
        assert not self.awake
        self.awake.append(self.name)
        return "cumem"

    def answer(self, prompt: Sequence[int]) -> list[Any]:
        assert self.awake == [self.name]
        return [self.says, *prompt]

    def sleep(self) -> None:
        self.awake.remove(self.name)

    def wake_up(self) -> None:
        if not self.has_room:
            raise RuntimeError("'wake_up' raised no room")
        assert not self.awake, "there is room for one"
        self.awake.append(self.name)
        if self.forgets:
            self.says = "nonsense"


@pytest.fixture
def engines() -> dict[str, Engine]:
    awake: list[str] = []
    return {name: Engine(name, awake) for name in ("first", "second")}


def check(example: dict[str, Any], engines: dict[str, Engine]) -> int:
    said = example["start"](engines)
    code: int = example["check"](engines, said)
    assert not engines["first"].awake
    return code


def test_one_is_awake_at_a_time(example: dict[str, Any], engines: dict[str, Engine]) -> None:
    assert check(example, engines) == 0


def test_another_answer_is_noticed(example: dict[str, Any], engines: dict[str, Engine]) -> None:
    engines["first"].forgets = True
    assert check(example, engines) == 1


def test_models_that_are_the_same_are_noticed(
    example: dict[str, Any], engines: dict[str, Engine]
) -> None:
    engines["second"].says = "first"
    assert check(example, engines) == 1


def test_an_engine_that_does_not_wake_is_noticed(
    example: dict[str, Any], engines: dict[str, Engine]
) -> None:
    engines["second"].has_room = False
    assert check(example, engines) == 1


def test_it_runs_on_any_machine() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--engine", "tiny", "--backend", "host"],
        capture_output=True,
        text=True,
        check=False,
        # Two processes that spin for the same cores get nowhere.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("backend host, asleep") == 2


def test_an_engine_that_cannot_be_started_is_told(
    example: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLEEPBACKENDS_BACKEND", "host")
    for name in example["ENVIRONMENT"]:
        monkeypatch.setenv(name, "")

    class Broken(Engine):
        def __init__(self, kind: str, folder: Path, share: float) -> None:
            super().__init__(kind, [])
            assert (folder / "model.safetensors").exists()

        def start(self) -> str:
            raise RuntimeError("'start' raised no driver")

        def close(self) -> None:
            closed.append(self.name)

    closed: list[str] = []
    main = example["main"]
    main.__globals__["Remote"] = Broken
    assert main(["--engine", "tiny", "--backend", "host"]) == 2
    assert "failed: 'start' raised no driver" in capsys.readouterr().out
    assert closed == ["tiny", "tiny"]


def test_without_vllm_it_says_what_to_install(
    example: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    main = example["main"]
    main.__globals__["find_spec"] = lambda _: None
    assert main(["--engine", "vllm"]) == 2
    assert "pip install vllm" in capsys.readouterr().out
