"""A process checkpoint alone and on top of cumem, of the same process.

Both keep the weights and drop or keep the KV cache as they can: alone, the driver moves all of
it; on top of cumem, what is left. Each runs in a process of its own, one after the other, and a
table in Markdown is printed.

    python -m benchmarks.process_checkpoint --weights-gib 16 --kv-gib 32
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sleepbackends.termination import end_with_parent

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
PIECE_BYTES = 256 << 20

AT_LEAST = {"suspend": 8.0, "resume": 4.0}
"""How many times faster the second is to be."""


def _say(**found: object) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def run(mode: str, weights_gib: float, kv_gib: float, cycles: int, changed: bool) -> None:
    """Fill memory, then suspend and resume; a line for each cycle."""
    import torch

    from sleepbackends import Orchestrator, SleepConfig
    from sleepbackends.checkpoint.device_memory import DeviceMonitor
    from sleepbackends.checkpoint.driver import CheckpointDriver
    from sleepbackends.checkpoint.measuring import OutsideMonitor

    monitor = OutsideMonitor()
    device = DeviceMonitor().devices[0]
    empty = monitor.measure([device])[device].used_bytes
    backend: Any = Orchestrator.create(SleepConfig(backend=mode)).backend
    tensors: dict[str, list[torch.Tensor]] = {}
    for tag, size_gib in (("weights", weights_gib), ("kv_cache", kv_gib)):
        count = round(size_gib * GIB / PIECE_BYTES)
        if hasattr(backend, "region"):
            with backend.region(tag):
                tensors[tag] = _fill(count)
        else:
            tensors[tag] = _fill(count)
    torch.cuda.synchronize()
    device = CheckpointDriver().devices_in_use()[0]
    sums = [int(tensor.sum()) for tensor in tensors["weights"]]
    for _ in range(cycles):
        if changed:
            for tensor in tensors["weights"]:
                tensor.neg_()
            sums = [int(tensor.sum()) for tensor in tensors["weights"]]
        torch.cuda.synchronize()
        started = time.perf_counter()
        backend.suspend(1)
        slept = time.perf_counter()
        left = monitor.measure([device])[device].used_bytes - empty
        asleep = time.perf_counter()
        backend.resume()
        woken = time.perf_counter()
        right = [int(tensor.sum()) for tensor in tensors["weights"]] == sums
        _say(suspend=slept - started, resume=woken - asleep, left_bytes=left, right=right)
    backend.close()


def _fill(count: int) -> list[Any]:
    import torch

    elements = PIECE_BYTES // 4
    return [
        torch.arange(elements, dtype=torch.int32, device="cuda").mul_(number + 1)
        for number in range(count)
    ]


def measure(mode: str, arguments: argparse.Namespace, cycles: int, changed: bool) -> list[Any]:
    """Run one mode in a process of its own and return what each cycle took."""
    sizes = ["--weights-gib", str(arguments.weights_gib), "--kv-gib", str(arguments.kv_gib)]
    command = [sys.executable, "-m", "benchmarks.process_checkpoint", "--mode", mode, *sizes]
    command += ["--cycles", str(cycles), *(["--changed"] if changed else [])]
    done = subprocess.run(  # noqa: S603 - runs this module
        command, capture_output=True, text=True, cwd=ROOT, check=False
    )
    if done.returncode:
        raise SystemExit(f"{mode} failed:\n{done.stdout}{done.stderr}")
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for cycle in found:  # a run that is cut short has said something
        print(f"{mode}: {cycle}", file=sys.stderr, flush=True)
    return found


def table(rows: Sequence[tuple[str, list[Any]]], weights_gib: float, kv_gib: float) -> str:
    """Write the table: seconds in the median of each mode's cycles, and the ratios."""
    lines = [
        f"{weights_gib:g} GiB of weights, {kv_gib:g} GiB of KV cache; seconds, median",
        "",
        "| mode | cycles | suspend | resume | left on the GPU (MiB) | bytes right |",
        "|---|---|---|---|---|---|",
    ]
    for name, cycles in rows:
        down, up = (median(c[verb] for c in cycles) for verb in ("suspend", "resume"))
        left = max(c["left_bytes"] for c in cycles) / (1 << 20)
        right = "yes" if all(c["right"] for c in cycles) else "NO"
        lines.append(f"| {name} | {len(cycles)} | {down:.3f} | {up:.3f} | {left:.0f} | {right} |")
    alone = rows[0][1]
    for name, cycles in rows[1:]:
        for verb, wanted in AT_LEAST.items():
            times = median(c[verb] for c in alone) / median(c[verb] for c in cycles)
            verdict = "at least" if times >= wanted else "LESS THAN"
            lines.append(f"\n{name}: {verb} {times:.1f} times faster ({verdict} {wanted:g})")
    return "\n".join(lines)


def main() -> None:
    """Measure both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights-gib", type=float, default=16.0)
    parser.add_argument("--kv-gib", type=float, default=32.0)
    parser.add_argument("--cycles", type=int, default=1, help="of the checkpoint alone")
    parser.add_argument(
        "--mode", choices=["checkpoint", "cumem+checkpoint"], help="run one, in this process"
    )
    parser.add_argument("--changed", action="store_true", help="change the weights each time")
    arguments = parser.parse_args()
    if arguments.mode:
        end_with_parent()
        sizes = arguments.weights_gib, arguments.kv_gib
        run(arguments.mode, *sizes, arguments.cycles, arguments.changed)
        return
    rows = [
        ("checkpoint", measure("checkpoint", arguments, arguments.cycles, changed=False)),
        (
            "cumem+checkpoint, weights changed",
            measure("cumem+checkpoint", arguments, 3 * arguments.cycles, changed=True),
        ),
        (
            "cumem+checkpoint, weights as before",
            measure("cumem+checkpoint", arguments, 3 * arguments.cycles, changed=False),
        ),
    ]
    print(table(rows, arguments.weights_gib, arguments.kv_gib))


if __name__ == "__main__":
    main()
