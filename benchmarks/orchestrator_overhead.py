"""Measure what the orchestrator adds to each call of its backend, with 1,000 blocks.

The backend is simulated and its blocks are one byte each, so that almost all of the time
is bookkeeping. The overhead is the orchestrator's time less the time of the backend calls
it made, in the same run.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from sleepbackends import EngineReport, Orchestrator
from sleepbackends.testing import FakeEngine, SimulatedBackend

BLOCKS = 1000
ROUNDS = 50


def measure() -> dict[str, Any]:
    """Return the overhead of each verb in milliseconds: best, median and worst."""
    backend = SimulatedBackend()
    for tag in ("weights", "kv_cache"):
        with backend.region(tag) as region:
            for _ in range(BLOCKS // 2):
                region.buffer(1)
    orchestrator = Orchestrator(backend, hooks=FakeEngine().hooks())
    overheads: dict[str, list[float]] = {}

    def note(report: EngineReport) -> None:
        inside_s = sum(step.seconds for step in report.steps)
        overheads.setdefault(report.operation, []).append(1e3 * (report.seconds - inside_s))

    for _ in range(ROUNDS):
        note(orchestrator.sleep(1))
        note(orchestrator.wake_up())
        note(orchestrator.release_kv_cache())
        orchestrator.wake_up()
    return {
        verb: {
            "best_ms": min(values),
            "median_ms": statistics.median(values),
            "worst_ms": max(values),
        }
        for verb, values in overheads.items()
    }


def main() -> None:
    """Print the table, or JSON with ``--json``."""
    figures = measure()
    if "--json" in sys.argv:
        print(json.dumps(figures))
        return
    print(f"orchestrator overhead with {BLOCKS} blocks, {ROUNDS} rounds\n")
    print("| call | best ms | median ms | worst ms |")
    print("|---|---|---|---|")
    for verb, row in figures.items():
        print("| " + " | ".join([verb, *(f"{value:.3f}" for value in row.values())]) + " |")


if __name__ == "__main__":
    main()
