"""Measure sleeps of several GPUs of one host: do all links stay busy, and what limits them.

For each number of GPUs, with one process a GPU and with all in one process: plain pinned copies,
first touch and registration of host memory, each GPU alone and all at once; first, dirty, clean
and staged suspends, resumes, releases of the KV cache; a process checkpoint on top; and one rank
that fails at every step. Then what coordination adds for up to 512 simulated ranks. On a
machine without GPUs it runs with small sizes over the host backend.

    python -m benchmarks.scale --out scale                    # all GPUs there are
    python -m benchmarks.scale --backend cumem --layout processes single --total-s 540 --out scale
    python -m benchmarks.scale --backend cumem --layout processes --ranks 8 --out scale
    python -m benchmarks.scale --backend host --weights-gib 0.01 --kv-gib 0.01 --tensor-mib 1
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from benchmarks import ranks as coordination
from benchmarks.scaling.host import copy_rates
from benchmarks.scaling.spec import GIB, LAYOUTS, MIB, ROOT, WHOLE_PROCESS, Spec
from benchmarks.scaling.tables import has_failed, markdown
from sleepbackends.errors import BackendUnavailableError
from sleepbackends.interpreter import JsonLines

COUNTS = (1, 2, 4, 8)
POLL_S = 0.1
BESIDE_GIB = 4.0
"""How much host memory a rank needs besides its weights: its process, and a checkpoint of it."""

SLACK_GIB = 8.0
TOUCH_SHARE = 0.25
"""How much of the time may go by while host memory is touched."""

END_S = 60.0
"""How long that may take to begin, and to give the memory back."""

NO_TIME = "no time was left"


def specs(chosen: argparse.Namespace, present: int) -> list[Spec]:
    """List what each process is to measure, in order."""
    counts = chosen.ranks or [most for most in COUNTS if most <= present]
    return [
        Spec(
            layout,
            backend,
            count,
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
        for count in counts
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
                stdin=subprocess.PIPE,  # whose end tells it that this process has gone
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
    """End a process, if it is still there, and all that it started, which may outlive it."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                child.kill()
    with suppress(ProcessLookupError):  # nobody is left
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _end_with(process_input: int) -> None:
    """End this process, and all of its session, once whoever started it has gone.

    Were it to go on, it would hold the memory of the GPUs, and nobody would read its rows.
    """

    def watch() -> None:
        while os.read(process_input, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def work(rows: Path, spec: Spec) -> None:
    """Be the process that measures."""
    from benchmarks.scaling.cases import Measurement
    from benchmarks.scaling.layouts import open_ranks

    def note(found: dict[str, Any]) -> None:
        with rows.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(found)}\n")

    _end_with(sys.stdin.fileno())
    with open_ranks(spec) as opened:
        Measurement(
            opened,
            spec,
            lambda row: note({"row": row.to_json()}),
            lambda facts: note({"ranks": facts}),
        ).run()


def touch(chosen: argparse.Namespace, count: int, give_up: float) -> dict[str, Any]:
    """Touch as much host memory as so many ranks need; tell how much that was, and is there.

    In a process of its own: what is registered needs a GPU's context, which would stay.
    """
    each_gib = max(chosen.weights_gib, chosen.plain_gib) + BESIDE_GIB
    wanted_gib = each_gib * count + SLACK_GIB
    seconds = min(chosen.run_timeout_s, TOUCH_SHARE * (give_up - time.monotonic()))
    command = [sys.executable, "-m", "benchmarks.scale", "--touch", str(wanted_gib), str(seconds)]
    found_gib = 0.0
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(  # noqa: S603 - runs this module
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=max(0.0, seconds) + END_S,
        )
        found_gib = float(done.stdout or 0)
    if found_gib < wanted_gib:
        said = f"the host gave {found_gib:.0f} of {wanted_gib:.0f} GiB: sleeps may find too little"
        print(said, file=sys.stderr, flush=True)
    return {"touched_gib": round(found_gib), **_host_memory()}


def touch_here(wanted_gib: float, seconds: float) -> float:
    """Be the process that touches; return how many GiB there were."""
    from sleepbackends.bench.first_time import do_once
    from sleepbackends.cumem.driver import CudaDriver

    until = time.monotonic() + seconds
    return do_once(int(wanted_gib * GIB), CudaDriver(), until=until) / GIB


def measure(
    chosen: argparse.Namespace, present: int, machine: dict[str, Any], give_up: float
) -> dict[str, Any]:
    """Measure everything until it is time to stop, and write all rows as they come."""
    result: dict[str, Any] = {
        "machine": machine,
        "host_copy_gib_s": copy_rates(min(64 * MIB, int(chosen.weights_gib * GIB))),
        "timeout_s": chosen.timeout_s,
        "rows": [],
        "places": {},
        "skipped": {},
        "coordination": {},
    }
    wanted = specs(chosen, present)
    for number, spec in enumerate(wanted, 1):

        def take(found: dict[str, Any], title: str = spec.title) -> None:
            if "row" in found:
                result["rows"].append(found["row"])
            else:
                result["places"][title] = found["ranks"]
            write_rows(chosen.out, result)

        print(f"[{number}/{len(wanted)}] {spec.title}", file=sys.stderr, flush=True)
        left_s = give_up - time.monotonic()
        problem = run(spec, min(chosen.run_timeout_s, left_s), take) if left_s > 0 else NO_TIME
        if problem:
            result["skipped"][spec.title] = problem
        write(chosen.out, result)
    for count in chosen.coordination:
        if time.monotonic() < give_up:
            result["coordination"][count] = coordination.measure("simulated", count)
        else:
            result["skipped"][f"coordination, {count}"] = NO_TIME
    write(chosen.out, result)
    return result


def write(folder: Path | None, result: dict[str, Any]) -> None:
    """Write the rows and the tables, if anywhere."""
    write_rows(folder, result)
    if folder is not None:
        _replace(folder / "scale.md", markdown(result))


def write_rows(folder: Path | None, result: dict[str, Any]) -> None:
    """Write what is known so far; whoever ends this process leaves it as it was or as it is."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "scale.json", json.dumps(result, indent=1) + "\n")


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


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
        **_host_memory(),
        "linux": platform.release(),
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    return present, facts


def _host_memory() -> dict[str, int]:
    return {"host_gib": round(psutil.virtual_memory().total / GIB)}


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
    add("--total-s", type=float, default=math.inf, help="of all; what comes later is left out")
    add(
        "--coordination",
        type=int,
        nargs="*",
        default=coordination.RANKS,
        help="of so many simulated ranks",
    )
    add("--no-faults", dest="faults", action="store_false", help="let no rank fail")
    add("--out", type=Path, help="write scale.json and scale.md into this folder")
    add("--work", nargs=2, help=argparse.SUPPRESS)
    add("--rank", nargs=3, help=argparse.SUPPRESS)
    add("--touch", nargs=2, type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    positive = (chosen.weights_gib, chosen.tensor_mib, chosen.plain_gib, *(chosen.ranks or ()))
    positive = (*positive, *chosen.coordination)
    if min(*positive, chosen.rounds, chosen.timeout_s, chosen.run_timeout_s, chosen.total_s) <= 0:
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
    if chosen.touch:
        print(touch_here(*chosen.touch))
        return 0
    on_gpus = any(backend.startswith("cumem") for backend in chosen.backend)
    try:
        present, machine = describe(on_gpus)
    except BackendUnavailableError as error:
        print(f"nothing can be measured here: {error}", file=sys.stderr)
        return 2
    most = max(chosen.ranks or [present])
    if on_gpus and most > present:
        print(f"--ranks {most}: there are {present} GPUs", file=sys.stderr)
        return 2
    give_up = time.monotonic() + chosen.total_s
    if on_gpus:
        machine |= touch(chosen, most, give_up)
    result = measure(chosen, present, machine, give_up)
    print(markdown(result))
    return int(has_failed(result))


if __name__ == "__main__":
    sys.exit(main())
