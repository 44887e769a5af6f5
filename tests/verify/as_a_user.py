"""``sleepbackends verify``, as its user runs it on a device that is there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def promises_not_tried(
    backend: str, sequences: int, folder: Path, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Verify a backend, which has to keep its promises; list those that no test has tried."""
    out = folder / "report.json"
    command = [sys.executable, "-m", "sleepbackends", "verify", backend]
    done = subprocess.run(
        [*command, "--sequences", str(sequences), "--out", out],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    promises = json.loads(out.read_text())["promises"].items()
    return [key for key, each in promises if each["outcome"] != "passed"]
