"""Measure how fast pinned host memory is made ready while it is already copied into.

For each size of chunks and number of threads: first touch, registration and copy of so many
GiB from a GPU, as the first suspend does it; and the copy alone, into memory that is ready.
The rounds go through the whole grid, in turn forwards and backwards. Medians are printed as
Markdown.

    python benchmarks/arena.py --gib 16 --chunk-mib 32 64 128 --threads 4 8 16
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

from sleepbackends.bench.host_memory import touch_host_memory
from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.cumem.probing import probe
from sleepbackends.vmm import arena
from sleepbackends.vmm.driver import Lane
from sleepbackends.vmm.places import Slot

GIB, MIB = 1 << 30, 1 << 20


class Setting(NamedTuple):
    """One point of the grid."""

    chunk_mib: int
    threads: int


class Times(NamedTuple):
    """Seconds since the memory was asked for, and of the copy alone."""

    ready_s: float
    """Until all of it was touched and registered."""
    copied_s: float
    """Until all of it was copied into as well."""
    again_s: float
    """Of a second copy into the same memory."""


@contextmanager
def applied(setting: Setting) -> Iterator[None]:
    """Have arenas that are made, used and closed inside do as the setting says."""
    before = arena.CHUNK_BYTES, arena.THREADS
    arena.CHUNK_BYTES, arena.THREADS = setting.chunk_mib * MIB, setting.threads
    try:
        yield
    finally:
        arena.CHUNK_BYTES, arena.THREADS = before


@contextmanager
def device_memory(driver: CudaDriver, size_bytes: int) -> Iterator[int]:
    """Have so much memory of the first device; yield its address."""
    from cuda.bindings import driver as cu

    with driver.current(0):
        address = int(driver.call(cu.cuMemAlloc, size_bytes))
        try:
            yield address
        finally:
            driver.call(cu.cuMemFree, address)


def copy(lane: Lane, address: int, slot: Slot) -> float:
    """Copy into a slot; return the moment at which its last piece was ready."""
    for part in slot.ranges:
        for piece in part.pieces():
            lane.to_host(piece.host, address, piece.size_bytes)
            address += piece.size_bytes
    ready = time.perf_counter()
    lane.wait()
    return ready


def measure_one(driver: CudaDriver, address: int, size_bytes: int) -> Times:
    """Measure an arena of its own."""
    lane = driver.lane(0, "copy")
    pinned = arena.Arena(driver, None, "retain")
    try:
        started = time.perf_counter()
        (slot,) = pinned.take([size_bytes])
        ready = copy(lane, address, slot)
        copied = time.perf_counter()
        copy(lane, address, slot)
        again = time.perf_counter()
        pinned.give_back(slot)
    finally:
        pinned.close()
    return Times(ready - started, copied - started, again - copied)


def measure(
    driver: CudaDriver, size_bytes: int, grid: Sequence[Setting], rounds: int
) -> dict[Setting, list[Times]]:
    """Go through the grid so many times; return the times of every round."""
    found: dict[Setting, list[Times]] = defaultdict(list)
    with device_memory(driver, size_bytes) as address:
        for number in range(rounds):
            for setting in reversed(grid) if number % 2 else grid:
                with applied(setting):
                    found[setting].append(measure_one(driver, address, size_bytes))
    return found


def markdown(size_bytes: int, found: Mapping[Setting, Sequence[Times]]) -> str:
    """Make a table: a row for each size of chunks, a column for each number of threads."""
    again_s = median(times.again_s for all_times in found.values() for times in all_times)
    threads = list(dict.fromkeys(setting.threads for setting in found))
    rounds = max(map(len, found.values()))
    gib = size_bytes / GIB
    lines = [
        f"Seconds until {gib:g} GiB are ready / and copied into, medians of {rounds} rounds.",
        f"The copy alone takes {again_s:.3f} s ({gib / again_s:.1f} GiB/s).",
        "",
        f"| chunks | {' | '.join(f'{number} threads' for number in threads)} |",
        "|---" * (len(threads) + 1) + "|",
    ]
    for chunk_mib in dict.fromkeys(setting.chunk_mib for setting in found):
        cells = []
        for number in threads:
            all_times = found[Setting(chunk_mib, number)]
            ready_s = median(times.ready_s for times in all_times)
            copied_s = median(times.copied_s for times in all_times)
            cells.append(f"{ready_s:.3f} / {copied_s:.3f} ({copied_s / again_s:.2f}x)")
        lines.append(f"| {chunk_mib} MiB | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/arena.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gib", type=float, default=16.0, help="how much memory")
    parser.add_argument("--chunk-mib", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 4, 8, 12, 16])
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args(arguments)
    if chosen.gib <= 0 or min(*chosen.chunk_mib, *chosen.threads, chosen.rounds) < 1:
        parser.error("all sizes and numbers must be positive")
    found = probe()
    if not found.ok:
        raise SystemExit(f"nothing can be measured here: {found.reason} ({found.hint})")
    size_bytes = int(chosen.gib * GIB)
    touch_host_memory(size_bytes)
    grid = list(itertools.starmap(Setting, itertools.product(chosen.chunk_mib, chosen.threads)))
    print(markdown(size_bytes, measure(CudaDriver(), size_bytes, grid, chosen.rounds)))


if __name__ == "__main__":
    main()
