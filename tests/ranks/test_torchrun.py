"""The example of an engine in several processes, as torchrun starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.ranks.test_torch_distributed import needs_gloo

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrun_engine.py"


@needs_gloo
def test_the_example_runs() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(EXAMPLE)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "rank 0 gave back 20 MiB",
        "rank 0: right",
        "rank 1 gave back 20 MiB",
        "rank 1: right",
    ]
