"""The example of reinforcement learning: it runs, and it notices when a step goes wrong."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.examples.tiny_engine import TinyEngine

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_weight_sync.py"


@pytest.fixture
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def run(example: dict[str, Any], *arguments: str, **replaced: Callable[..., Any]) -> int:
    main = example["main"]
    main.__globals__.update(replaced)
    code: int = main(["--backend", "host", "--steps", "1", *arguments])
    return code


def test_it_runs_on_any_machine() -> None:
    command = [sys.executable, str(EXAMPLE), "--backend", "host", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "backend: host" in done.stdout


def test_several_steps_are_right(example: dict[str, Any]) -> None:
    assert run(example, "--steps", "2") == 0


def test_weights_that_are_not_updated_are_noticed(
    example: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(example, sync_weights=lambda engine, path: None) == 1
    assert "not what the new weights say" in capsys.readouterr().out


def test_an_update_that_replaces_tensors_is_noticed(
    example: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The model would be right, and every captured graph would read the old memory."""

    def replace(engine: TinyEngine, path: Path) -> None:
        engine.weights.update(example["load_file"](path))

    assert run(example, sync_weights=replace) == 1
    assert "moved" in capsys.readouterr().out


def test_old_keys_and_values_are_noticed(
    example: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TinyEngine, "drop_caches", lambda self, tags: None)
    assert run(example) == 1
    assert "not what the new weights say" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("--steps", "0"), ("--backend", "nobody")])
def test_what_cannot_be_run_is_told(
    example: dict[str, Any], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert run(example, *arguments) == 2
    assert "failed: " in capsys.readouterr().out
