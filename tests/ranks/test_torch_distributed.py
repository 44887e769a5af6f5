"""Ranks in processes of a gloo process group, with the host backend."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

from sleepbackends import RequestError
from sleepbackends.ranks import TorchDistributedGroup
from sleepbackends.testing import SimulatedBackend

SCRIPT = Path(__file__).with_name("gloo_rank.py")
ROOT = Path(__file__).parents[2]

needs_gloo = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason=f"torch {torch.__version__} was built without gloo",
)


def play(scenarios: str, count: int, tmp_path: Path) -> str:
    """Play scenarios in so many processes; return what they print."""
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", str(SCRIPT)),
            *(scenarios, str(count), str(tmp_path / "rendezvous")),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@needs_gloo
def test_two_ranks_are_driven_and_call_together_and_one_hangs(tmp_path: Path) -> None:
    assert play("driver,spmd,hung", 2, tmp_path) == "exit codes: [0, 0]\n"


@needs_gloo
def test_a_rank_that_is_killed_is_named_and_the_others_are_usable(tmp_path: Path) -> None:
    killed = -signal.SIGKILL
    said = play("died", 3, tmp_path)
    assert said == f"rank 1 is usable\nexit codes: [{killed}, 0, {killed}]\n"


@needs_gloo
def test_one_of_eight_processes_fails_at_every_step_and_is_killed(tmp_path: Path) -> None:
    codes = [0] * 7 + [-signal.SIGKILL]
    assert play("eight", 8, tmp_path) == f"exit codes: {codes}\n"


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(RequestError, match="no process group") as caught:
        TorchDistributedGroup(SimulatedBackend())
    assert "init_process_group" in caught.value.hint
