"""The examples that choose a backend, on the device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_weights_are_updated_while_the_cache_is_away() -> None:
    command = [sys.executable, str(EXAMPLES / "rl_weight_sync.py"), "--backend", "cumem"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "backend: cumem" in done.stdout
