"""Measure sleeps of several GPUs of one host: do all links stay busy, and what limits them.

For each number of GPUs, with one process a GPU and with all in one process: plain pinned copies,
first touch and registration of host memory, each GPU alone and all at once; first, dirty, clean
and staged suspends, resumes, releases of the KV cache; a process checkpoint on top; and one rank
that fails at every step. On a machine without GPUs it runs with small sizes over the host backend.

    python -m benchmarks.scale --out scale                    # all GPUs there are, 20 minutes
    python -m benchmarks.scale --backend cumem --layout processes --ranks 8 --out scale
    python -m benchmarks.scale --backend host --weights-gib 0.01 --kv-gib 0.01 --tensor-mib 1
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from benchmarks.scaling.host import copy_rates
from benchmarks.scaling.spec import GIB, LAYOUTS, MIB, ROOT, WHOLE_PROCESS, Spec
from benchmarks.scaling.tables import has_failed, markdown
from sleepbackends.errors import BackendUnavailableError
from sleepbackends.interpreter import JsonLines

COUNTS = (1, 2, 4, 8)
POLL_S = 0.1
SLACK_GIB = 8.0


def specs(chosen: argparse.Namespace, present: int) -> list[Spec]:
    """List what each process is to measure, in order."""
    counts = chosen.ranks or [count for count in COUNTS if count <= present]
    return [
        Spec(
            layout,
            backend,
            ranks,
            chosen.weights_gib,
            chosen.kv_gib,
            chosen.tensor_mib,
            chosen.plain_gib,
            chosen.rounds,
            chosen.timeout_s,
            chosen.faults,
        )
        for backend in chosen.backend
        for layout in chosen.layout
        for ranks in counts
        # Several backends that each take this process would take it from one another.
        if not (WHOLE_PROCESS in backend and layout == "threads")
    ]


def run(spec: Spec, timeout_s: float, take: Callable[[dict[str, Any]], None]) -> str:
    """Measure in a process of its own; return what went wrong, or nothing."""
    with tempfile.TemporaryDirectory(prefix="sleepbackends-scale-") as folder:
        path, log = Path(folder) / "rows", Path(folder) / "log"
        path.touch()
        with path.open() as file, log.open("wb") as said:
            rows = JsonLines(file, take)
            process = subprocess.Popen(  # noqa: S603 - runs this module
                [sys.executable, "-m", "benchmarks.scale", "--work", str(path), spec.to_json()],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )
            deadline = time.monotonic() + timeout_s
            try:
                while process.poll() is None and time.monotonic() < deadline:
                    time.sleep(POLL_S)
                    rows.read()
                in_time = process.poll() is not None
            finally:
                _end(process)
            rows.read()
        if not in_time:
            return f"not done after {timeout_s:g} s"
        if process.returncode:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no message"]
            print("\n".join(lines[-40:]), file=sys.stderr)
            return f"exit code {process.returncode}: {lines[-1]}"
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that is still there, and those that it started."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
    process.wait()


def work(rows: Path, spec: Spec) -> None:
    """Be the process that measures."""
    from benchmarks.scaling.cases import Measurement
    from benchmarks.scaling.layouts import open_ranks

    def note(found: dict[str, Any]) -> None:
        with rows.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(found)}\n")

    with open_ranks(spec) as ranks:
        note(Measurement(ranks, spec, lambda row: note({"row": row.to_json()})).run())


def measure(chosen: argparse.Namespace, present: int, machine: dict[str, Any]) -> dict[str, Any]:
    """Measure everything, and write what is known after each process."""
    result: dict[str, Any] = {
        "machine": machine,
        "host_copy_gib_s": copy_rates(min(64 * MIB, int(chosen.weights_gib * GIB))),
        "timeout_s": chosen.timeout_s,
        "rows": [],
        "places": {},
        "skipped": {},
    }
    wanted = specs(chosen, present)
    for number, spec in enumerate(wanted, 1):

        def take(found: dict[str, Any], title: str = spec.title) -> None:
            if "row" in found:
                result["rows"].append(found["row"])
            else:
                result["places"][title] = found["ranks"]

        print(f"[{number}/{len(wanted)}] {spec.title}", file=sys.stderr, flush=True)
        problem = run(spec, chosen.run_timeout_s, take)
        if problem:
            result["skipped"][spec.title] = problem
        if chosen.out:
            write(chosen.out, result)
    return result


def write(folder: Path, result: dict[str, Any]) -> None:
    """Write the rows and the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scale.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (folder / "scale.md").write_text(markdown(result), encoding="utf-8")


def describe(on_gpus: bool) -> tuple[int, dict[str, Any]]:
    """Return how many GPUs there are, and what the figures depend on.

    Raises
    ------
    BackendUnavailableError
        If GPUs are needed and cannot be used.
    """
    facts: dict[str, Any] = {}
    present = COUNTS[-1]
    if on_gpus:
        from sleepbackends.bench.machine import _driver_version
        from sleepbackends.cumem.driver import CudaDriver

        driver = CudaDriver()
        present = driver.device_count
        facts = {"gpus": present, "driver": _driver_version()}
        driver.close()
    facts |= {
        "cpus": os.cpu_count(),
        "host_gib": round(psutil.virtual_memory().total / GIB),
        "linux": platform.release(),
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    return present, facts


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--backend", nargs="+", default=["cumem", "cumem+checkpoint"])
    add("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    add("--ranks", type=int, nargs="+", help=f"by default those of {COUNTS} that there are")
    add("--weights-gib", type=float, default=16.0, help="on each GPU")
    add("--kv-gib", type=float, default=32.0, help="on each GPU; 0 for none")
    add("--tensor-mib", type=float, default=256.0, help="size of the weight tensors")
    add("--plain-gib", type=float, default=4.0, help="pinned for plain copies on each GPU")
    add("--rounds", type=int, default=3)
    add("--timeout-s", type=float, default=60.0, help="deadline of each transition")
    add("--run-timeout-s", type=float, default=300.0, help="of each process")
    add("--no-faults", dest="faults", action="store_false", help="let no rank fail")
    add("--out", type=Path, help="write scale.json and scale.md into this folder")
    add("--work", nargs=2, help=argparse.SUPPRESS)
    add("--rank", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    positive = (chosen.weights_gib, chosen.tensor_mib, chosen.plain_gib, *(chosen.ranks or ()))
    if min(*positive, chosen.rounds, chosen.timeout_s, chosen.run_timeout_s) <= 0:
        parser.error("all sizes and numbers must be positive")
    if chosen.kv_gib < 0:
        parser.error("--kv-gib must be 0 or more")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if something failed, 2 if nothing can be measured here."""
    chosen = parse(arguments)
    if chosen.work:
        path, spec = chosen.work
        work(Path(path), Spec(**json.loads(spec)))
        return 0
    if chosen.rank:
        from benchmarks.scaling.layouts import serve

        number, rendezvous, spec = chosen.rank
        serve(Spec(**json.loads(spec)), int(number), rendezvous)
        return 0
    on_gpus = any(backend.startswith("cumem") for backend in chosen.backend)
    try:
        present, machine = describe(on_gpus)
    except BackendUnavailableError as error:
        print(f"nothing can be measured here: {error}", file=sys.stderr)
        return 2
    if on_gpus:
        from sleepbackends.bench.machine import touch_host_memory

        most = max(chosen.ranks or [present])
        touch_host_memory(int((2 * chosen.weights_gib * most + SLACK_GIB) * GIB))
    result = measure(chosen, present, machine)
    print(markdown(result))
    return int(has_failed(result))


if __name__ == "__main__":
    sys.exit(main())
