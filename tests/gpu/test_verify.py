"""``sleepbackends verify cumem`` on the GPU, as its user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_cumem_keeps_its_promises(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sleepbackends"]
    out = tmp_path / "report.json"
    done = subprocess.run(
        [*command, "verify", "cumem", "--sequences", "20", "--out", out],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    promises = report["promises"].items()
    assert [key for key, each in promises if each["outcome"] != "passed"] == []
