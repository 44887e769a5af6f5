"""Look for deadlocks between allocation in a region and everything else torch offers.

torch calls a pluggable allocator with its own mutex held. One thread allocates in a region
while another calls one function in a loop, each pair in a process of its own; a process
that does not end in time hangs.

    python -m benchmarks.deadlock --seconds 60 --peers DIR
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from sleepbackends.bench.peers import missing, open_allocator
from sleepbackends.bench.rows import OURS
from sleepbackends.termination import end_with_parent

ROOT = Path(__file__).resolve().parents[1]

STARTUP_S = 90.0
"""How long a process may take beyond its seconds: imports, the CUDA context, the last round."""

SEGMENTS, SEGMENT_BYTES = 50, 20 << 20


def _of_torch(name: str) -> object:
    import torch

    return getattr(torch.cuda, name)()


def _drop_tensors() -> None:
    import torch

    made = [torch.empty(1 << 20, device="cuda") for _ in range(10)]
    made[0].record_stream(torch.cuda.current_stream())


def _collect() -> None:
    import torch

    cyclic: list[Any] = [torch.empty(1 << 20, device="cuda")]
    cyclic.append(cyclic)
    del cyclic
    gc.collect()


FUNCTIONS: dict[str, Callable[[], object]] = {
    "memory_stats": partial(_of_torch, "memory_stats"),
    "memory_snapshot": partial(_of_torch, "memory_snapshot"),
    "memory_reserved": partial(_of_torch, "memory_reserved"),
    "reset_peak_memory_stats": partial(_of_torch, "reset_peak_memory_stats"),
    "empty_cache": partial(_of_torch, "empty_cache"),
    "drop_tensors": _drop_tensors,
    "collect": _collect,
}
"""What the second thread calls, by name."""


def work(allocator_name: str, function: str, seconds: float, folder: Path | None) -> None:
    """Allocate in one thread and call the function in another, for so many seconds."""
    import torch

    torch.zeros(1, device="cuda")
    call = FUNCTIONS[function]
    allocator = open_allocator(allocator_name, folder)
    stop_at = time.monotonic() + seconds
    failures: list[BaseException] = []
    segments = 0

    def allocate() -> None:
        nonlocal segments
        try:
            while time.monotonic() < stop_at:
                with allocator.region("weights"):
                    made = [
                        torch.empty(SEGMENT_BYTES, dtype=torch.uint8, device="cuda")
                        for _ in range(SEGMENTS)
                    ]
                segments += len(made)
                del made
        except BaseException as error:  # noqa: BLE001 - the other thread raises it
            failures.append(error)

    thread = threading.Thread(target=allocate)
    thread.start()
    calls = 0
    while thread.is_alive():
        call()
        calls += 1
    if failures:
        raise failures[0]
    print(json.dumps({"segments": segments, "calls": calls}), flush=True)
    if not allocator.exits_cleanly:
        os._exit(0)


def run(
    allocator: str, function: str, seconds: float, folder: Path | None = None
) -> tuple[str, dict[str, int]]:
    """Run one pair in a process of its own.

    Returns
    -------
    outcome : str
        ``runs``, ``hangs``, or what the process failed with.
    counts : dict
        How many ``segments`` were allocated and ``calls`` made; empty unless it runs.
    """
    command = [sys.executable, "-m", "benchmarks.deadlock", "--seconds", str(seconds)]
    command += ["--work", allocator, function]
    command += ["--peers", str(folder)] if folder else []
    try:
        done = subprocess.run(  # noqa: S603 - runs this module
            command,
            cwd=ROOT,
            timeout=seconds + STARTUP_S,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hangs", {}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return f"exit code {done.returncode}: {last[0]}", {}
    return "runs", json.loads(done.stdout.splitlines()[-1])


def run_all(
    allocator: str, names: Sequence[str], seconds: float, folder: Path | None = None
) -> dict[str, tuple[str, dict[str, int]]]:
    """Run the pairs of these functions all at once, as one that hangs takes its time to show."""
    with ThreadPoolExecutor(len(names)) as pool:
        found = pool.map(lambda name: run(allocator, name, seconds, folder), names)
        return dict(zip(names, found, strict=True))


def markdown(outcomes: Mapping[tuple[str, str], str], allocators: Sequence[str]) -> str:
    """Make a table: a row for each function, a column for each allocator."""
    lines = [f"| second thread calls | {' | '.join(allocators)} |"]
    lines.append("|---" * (len(allocators) + 1) + "|")
    for function in FUNCTIONS:
        cells = [outcomes.get((allocator, function), "") for allocator in allocators]
        lines.append(f"| {function} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every pair; return 1 if one of ours does not run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deadlock",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each pair")
    parser.add_argument("--peers", type=Path, help="a folder with vllm/; else it is installed")
    parser.add_argument("--only", nargs="+", choices=(OURS, "vllm"), default=[OURS, "vllm"])
    parser.add_argument("--functions", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS))
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.work:
        end_with_parent()  # a process that hangs ends no other way
        allocator, function = chosen.work
        work(allocator, function, chosen.seconds, chosen.peers)
        return 0
    outcomes: dict[tuple[str, str], str] = {}
    allocators = []
    for allocator in chosen.only:
        why = missing(allocator, chosen.peers)
        if why:
            print(f"{allocator} is skipped: {why}", file=sys.stderr)
            continue
        allocators.append(allocator)
        how = run_all(allocator, chosen.functions, chosen.seconds, chosen.peers)
        for function, (outcome, counts) in how.items():
            outcomes[allocator, function] = outcome
            print(f"{allocator} {function}: {outcome} {counts}", file=sys.stderr, flush=True)
    print(markdown(outcomes, allocators))
    return int(any(how != "runs" for (name, _), how in outcomes.items() if name == OURS))


if __name__ == "__main__":
    sys.exit(main())
