"""Compare the host backend's suspend and resume with plain file input and output.

In each round the same bytes are written to and read from a file by one thread without
any checks, and suspended and resumed by the backend; which goes first alternates. Reads
go into memory that was never touched (what a resume has to do) and into memory that was
in use before. Medians of all rounds are printed.

    python benchmarks/host_spool.py --gib 2
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from sleepbackends.host.backend import HostBackend
from sleepbackends.host.options import HostOptions
from sleepbackends.hostmemory.files import read_into, write_all

GIB = 1 << 30


def timed(call: Callable[[], object]) -> float:
    """Return how many seconds a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def plain(
    data: memoryview, reused: memoryview, directory: Path, options: HostOptions
) -> dict[str, float]:
    """Time one thread that writes and reads a file chunk by chunk, with the same caching."""
    chunk_bytes, uncached = options.chunk_bytes, options.drop_page_cache
    offsets = range(0, len(data), chunk_bytes)
    with (
        tempfile.TemporaryFile(dir=directory) as file,
        mmap.mmap(-1, len(data), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh,
    ):
        fd = file.fileno()

        def write() -> None:
            for offset in offsets:
                write_all(fd, data[offset : offset + chunk_bytes], offset)
                if uncached:
                    os.fdatasync(fd)

        def read(into: memoryview) -> None:
            for offset in offsets:
                read_into(fd, into[offset : offset + chunk_bytes], offset)

        seconds = {"plain write": timed(write)}
        with memoryview(fresh) as untouched:
            for name, memory in (("fresh", untouched), ("reused", reused)):
                if uncached:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                seconds[f"plain read, {name} memory"] = timed(partial(read, memory))
    return seconds


def ours(backend: HostBackend) -> dict[str, float]:
    """Time one suspend and one resume."""
    return {"suspend": timed(backend.suspend), "resume": timed(backend.resume)}


def measure(size_bytes: int, rounds: int, options: HostOptions) -> dict[str, list[float]]:
    """Return the seconds of every round, by what was done."""
    seconds: dict[str, list[float]] = defaultdict(list)
    backend = HostBackend(options)
    try:
        with backend.region("weights") as region:
            array = region.empty(size_bytes, "u1")
        array[:] = numpy.random.default_rng(0).integers(0, 256, size_bytes, dtype="u1")
        data = memoryview(array.copy())
        reused = memoryview(bytearray(size_bytes))
        directory = options.spool_directory or Path(tempfile.gettempdir())
        steps: list[Callable[[], dict[str, float]]] = [
            lambda: plain(data, reused, directory, options),
            lambda: ours(backend),
        ]
        for number in range(rounds + 1):
            for step in steps if number % 2 else reversed(steps):
                for name, value in step().items():
                    if number:  # the first round only makes the machine warm
                        seconds[name].append(value)
        if not numpy.array_equal(array, numpy.frombuffer(data, "u1")):
            raise SystemExit("the bytes that came back are not the bytes that were saved")
    finally:
        backend.close()
    return seconds


def table(size_bytes: int, seconds: dict[str, list[float]]) -> str:
    """Return medians, their rates and the ratios of those, as a markdown table."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    against = {
        "suspend": ["plain write"],
        "resume": ["plain read, fresh memory", "plain read, reused memory"],
    }
    lines = ["| | median s | best s | GiB/s | of the plain rate |", "|---|---|---|---|---|"]
    for name, value in median.items():
        ratios = ", ".join(
            f"{median[other] / value:.0%} ({other})" for other in against.get(name, [])
        )
        best, rate = min(seconds[name]), size_bytes / GIB / value
        lines.append(f"| {name} | {value:.3f} | {best:.3f} | {rate:.2f} | {ratios} |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=float, default=2.0, help="how much memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk-mib", type=int, default=HostOptions().chunk_bytes >> 20)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--drop-page-cache", action="store_true")
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--json", type=Path, help="also write every round to this file")
    arguments = parser.parse_args()
    options = HostOptions(
        spool_directory=arguments.directory,
        chunk_bytes=arguments.chunk_mib << 20,
        threads=arguments.threads,
        drop_page_cache=arguments.drop_page_cache,
    )
    size_bytes = int(arguments.gib * GIB)
    seconds = measure(size_bytes, arguments.rounds, options)
    print(table(size_bytes, seconds))
    if arguments.json:
        result: dict[str, Any] = {
            "size_bytes": size_bytes,
            "options": options.model_dump(mode="json"),
            "processors": os.cpu_count(),
            "seconds": seconds,
        }
        arguments.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
