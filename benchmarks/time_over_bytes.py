"""Draw the time of clean and of dirty suspends, and of resumes, over bytes.

Each amount of weights has a backend of its own, one after the other in one process; medians of
some rounds. ``--html`` writes a page with the chart, as of ``sleepbackends bench``.

    python benchmarks/time_over_bytes.py --gib 1 4 16 64 --html bytes.html
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sleepbackends.bench.first_time import do_once
from sleepbackends.bench.machine import describe, machine
from sleepbackends.bench.page import page
from sleepbackends.bench.request import Request, Spec
from sleepbackends.bench.rows import OURS, PLAIN_COPY, Row, link_rates
from sleepbackends.bench.tables import markdown
from sleepbackends.bench.weights import Weights
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.driver import CudaDriver

GIB, MIB = 1 << 30, 1 << 20
TENSOR_MIB = 256.0
PLAIN_GIB = 4


def timed(call: Callable[[], object]) -> float:
    """Return how many seconds a call takes, with the device idle before."""
    import torch

    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def plain_copies(gib: float, rounds: int) -> Iterator[Row]:
    """Copy as many bytes between pinned and device memory."""
    import torch

    spec = Spec(PLAIN_COPY, weights_gib=gib, tensor_mib=PLAIN_GIB * 1024)
    size_bytes = int(min(PLAIN_GIB, gib) * GIB)
    host = torch.ones(size_bytes, dtype=torch.uint8).pin_memory()
    memory = torch.ones(size_bytes, dtype=torch.uint8, device="cuda")

    def copy(down: bool) -> None:
        for _ in range(int(gib * GIB) // size_bytes):
            (host if down else memory).copy_(memory if down else host, non_blocking=True)
        torch.cuda.synchronize()

    copy(down=True)
    for number in range(rounds):
        yield spec.row("suspend_dirty", number, timed(lambda: copy(down=True)))
        yield spec.row("resume", number, timed(lambda: copy(down=False)))


def suspends(gib: float, rounds: int) -> Iterator[Row]:
    """Suspend everything changed, resume, suspend nothing changed."""
    spec = Spec(OURS, weights_gib=gib, tensor_mib=TENSOR_MIB)
    backend = CumemBackend()
    weights = Weights(int(TENSOR_MIB * MIB))
    with backend.region("weights"):
        weights.allocate(int(gib * 1024 / TENSOR_MIB))
    weights.fill()
    for number in range(rounds + 1):
        weights.change(number)
        case = "suspend_dirty" if number else "suspend_first"
        yield spec.row(case, number, timed(backend.suspend))
        yield spec.row("resume", number, timed(backend.resume))
        yield spec.row("suspend_clean", number, timed(backend.suspend))
        backend.resume()
        weights.check()
    del weights
    backend.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/time_over_bytes.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gib", type=float, nargs="+", default=[1.0, 4.0, 16.0, 64.0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--html", type=Path, help="write the page with the chart")
    chosen = parser.parse_args(arguments)
    if min(chosen.gib) < 1 or chosen.rounds < 1:
        parser.error("at least 1 GiB and one round are needed")
    found = CumemBackend.probe()
    if not found.ok:
        raise SystemExit(f"nothing can be measured here: {found.reason} ({found.hint})")
    import torch

    do_once(int((max(chosen.gib) + 8) * GIB), CudaDriver())
    rows: list[Row] = []
    for gib in sorted(chosen.gib):
        for measure in (plain_copies, suspends):
            rows += measure(gib, chosen.rounds)
            torch.cuda.empty_cache()
    request = Request(weights_gib=tuple(chosen.gib), kv_gib=0.0, tensor_mib=(TENSOR_MIB,), only=())
    result: dict[str, Any] = {
        "machine": machine(describe(), request),
        "link": link_rates(rows),
        "skipped": {},
        "rows": [row.to_json() for row in rows],
    }
    print(markdown(result), end="")
    if chosen.html:
        chosen.html.write_text(page(result), encoding="utf-8")


if __name__ == "__main__":
    main()
