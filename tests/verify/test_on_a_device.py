"""``sleepbackends verify`` on simulated devices, as its user runs it on one that is there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulators import cuda, level_zero

Environment = Callable[[], dict[str, str]]


@pytest.mark.parametrize(
    ("backend", "environment", "not_tried"),
    [
        ("cumem", lambda: cuda.environment(cuda.build().parent), []),
        # Fingerprints are torch's there, which has no such device here.
        ("xpu", level_zero.environment, ["staging"]),
    ],
)
def test_promises_are_tried(
    backend: str, environment: Environment, not_tried: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sleepbackends", "verify", backend),
            *("--sequences", "3", "--out", out),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    promises = report["promises"].items()
    assert [key for key, each in promises if each["outcome"] != "passed"] == not_tried
