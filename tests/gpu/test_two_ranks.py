"""Two processes with a GPU each, whose memory moves together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("two_ranks.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_they_sleep_and_wake_as_one_with_both_links_busy(tmp_path: Path) -> None:
    """Also: a rank without room leaves both asleep, and communicators survive."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(tmp_path / "rendezvous")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [(process, *process.communicate(timeout=280)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, out, err in ended:
        assert process.returncode == 0, out + err
    found = json.loads(ended[0][1])
    for way in ("down", "up"):
        # Twice the bytes over two links take little longer than once the bytes over one.
        share = 2 * found[f"alone_{way}_s"] / found[f"both_{way}_s"]
        assert share >= 1.6, (way, found)
