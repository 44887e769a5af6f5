"""Each deliberate mistake in the driver's files makes the suite fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.xpu.mutations import MUTATIONS, VARIABLE

FOLDER = Path(__file__).parent
SUITE = [
    [str(FOLDER / f"test_{name}.py") for name in names]
    for names in (("lanes", "backend"), ("torch",), ("contract", "driver_faults"))
]
"""What finds most of them soonest comes first; the rest takes long to import."""

TESTS_FAILED = 1

Done = subprocess.CompletedProcess[str]


def run(mutation: str) -> Done:
    """Run the suite until something fails."""
    # Plain: pytest would compare megabytes line by line where CI is set.
    options = ["-x", "-q", "-p", "no:cacheprovider", *("-p", "no:schemathesis"), "--assert=plain"]
    for part in SUITE:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *part],
            cwd=FOLDER.parents[1],
            env={**os.environ, VARIABLE: mutation},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if done.returncode:
            break
    return done


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[Done]]]:
    """All of them at once, as many as there are processors at a time."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {mutation: pool.submit(run, mutation) for mutation in MUTATIONS}


def test_there_are_at_least_ten() -> None:
    assert len(MUTATIONS) >= 10


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_it_is_caught(runs: dict[str, Future[Done]], mutation: str) -> None:
    done = runs[mutation].result()
    assert done.returncode == TESTS_FAILED, done.stdout[-2000:] + done.stderr[-2000:]
    assert "FAILED" in done.stdout or "ERROR" in done.stdout
