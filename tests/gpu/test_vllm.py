"""vLLM itself over our memory: tokens, contents, room, with and without CUDA graphs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import vllm_faults, vllm_unchosen
from benchmarks.vllm_engine import ENVIRONMENT as ALONE
from sleepbackends.checkpoint.backend import CheckpointBackend

from .vllm_model import obstacle, save_model

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 540.0

ENVIRONMENT = {**ALONE, "SLEEPBACKENDS_BACKEND": "cumem", "SLEEPBACKENDS_VLLM": "1"}


pytestmark = [
    pytest.mark.skipif(bool(obstacle()), reason=obstacle()),
    pytest.mark.timeout(TIMEOUT_S + 30),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def run(model: Path, scenario: str, **env: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.vllm_scenarios", str(model), scenario],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=TIMEOUT_S,
            env={**os.environ, **ENVIRONMENT, **env},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        # Bytes, although text was asked for.
        said = (error.stderr or b"").decode(errors="replace")
        pytest.fail(f"not done after {TIMEOUT_S:g} s\n{said[-6000:]}")
    said = f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    assert done.returncode == 0, said
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    wrong = [what for what, holds in found.items() if holds is not True]
    assert not wrong, f"{wrong}\n{said}"
    return found


@pytest.mark.parametrize("scenario", ["eager", "graphs"])
def test_everything(model: Path, scenario: str) -> None:
    found = run(model, scenario)
    assert len(found) > 20


def test_an_engine_in_a_child_process(model: Path) -> None:
    run(model, "child", VLLM_ENABLE_V1_MULTIPROCESSING="1")


def test_unchosen_vllm_is_as_if_ours_were_not_installed() -> None:
    found = vllm_unchosen.measure()
    assert vllm_unchosen.differences(found) == [], vllm_unchosen.markdown(found)


def test_statistics_while_loading_and_waking_without_room() -> None:
    """The same with vLLM's own allocator is recorded by the benchmark."""
    found = vllm_faults.measure([vllm_faults.OURS])[vllm_faults.OURS]
    assert vllm_faults.wrong(found) == [], f"{found.facts}\n{found.log}"


def test_a_backend_that_cannot_be_used_leaves_vllm_its_own(model: Path) -> None:
    run(model, "foreign", SLEEPBACKENDS_BACKEND="host")


def test_the_whole_process_sleeps(model: Path) -> None:
    available = CheckpointBackend.probe()
    if not available:
        pytest.skip(available.reason)
    run(model, "process", SLEEPBACKENDS_BACKEND="cumem+checkpoint")


@pytest.mark.parametrize(
    "command",
    [("vllm_sleep.py", "--graphs"), ("two_models_one_gpu.py", "--engine", "vllm")],
    ids=lambda command: command[0],
)
def test_an_example(command: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, f"examples/{command[0]}", *command[1:]],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=TIMEOUT_S,
        env={**os.environ, **ENVIRONMENT},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
