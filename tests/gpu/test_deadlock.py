"""While one thread allocates in a region, another may ask torch for anything."""

from __future__ import annotations

import os

import pytest

from benchmarks.deadlock import FUNCTIONS, SEGMENTS, run_all
from sleepbackends.bench.rows import OURS

SECONDS = float(os.environ.get("SLEEPBACKENDS_TEST_SECONDS", "5"))

Outcomes = dict[str, tuple[str, dict[str, int]]]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """Each function in a process of its own, all at once."""
    return run_all(OURS, list(FUNCTIONS), SECONDS)


@pytest.mark.timeout(SECONDS + 150)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_nothing_hangs(outcomes: Outcomes, function: str) -> None:
    outcome, counts = outcomes[function]
    assert outcome == "runs"
    # Both threads got somewhere.
    assert counts["segments"] >= 2 * SEGMENTS
    assert counts["calls"] >= SECONDS
