"""Compare the cumem backend's disk tier with plain direct reads and writes of the same directory.

In each round as many bytes are written to an unnamed file and read back by as many threads, in
blocks as large, as the backend's, and suspended and resumed by the backend; which goes first
alternates. Every file is new. Medians of all rounds are printed. The backend's times hold its
fingerprints and the copies from and to the device too.

    python benchmarks/disk_tier.py --gib 8 --directory /mnt/nvme
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.hostmemory.directory import choose_directory
from sleepbackends.hostmemory.driver import round_up
from sleepbackends.vmm import places, ring
from sleepbackends.vmm.region import DeviceMemory
from sleepbackends.vmm.saved_file import UNIT_BYTES, SavedFile

GIB = 1 << 30
AGAINST = {"suspend": "plain write", "resume": "plain read"}


def timed(call: Callable[[], object]) -> float:
    """Return how many seconds a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def plain(size_bytes: int, directory: Path, pool: ThreadPoolExecutor) -> dict[str, float]:
    """Time threads that take the blocks of a new file in turn, each from memory of its own."""
    block_bytes, threads = places.BUFFER_BYTES, ring.BUFFERS
    size_bytes = round_up(size_bytes, UNIT_BYTES)
    buffers = []
    for number in range(threads):
        buffers.append(mmap.mmap(-1, block_bytes))
        # Not zeros, which some disks do not store.
        buffers[-1].write(random.Random(number).randbytes(block_bytes))  # noqa: S311 - no secret
    file = SavedFile(directory, size_bytes, direct=True)

    def every(do: Callable[[memoryview, int], object]) -> None:
        def some(number: int) -> None:
            for offset in range(number * block_bytes, size_bytes, threads * block_bytes):
                with memoryview(buffers[number]) as data:
                    do(data[: size_bytes - offset], offset)

        list(pool.map(some, range(threads)))

    try:
        return {
            "plain write": timed(lambda: every(file.write)),
            "plain read": timed(lambda: every(file.read)),
        }
    finally:
        if not file.is_direct:
            print(f"note: {directory} takes no direct I/O, the page cache is part of all times")
        file.close()


def ours(backend: CumemBackend) -> dict[str, float]:
    """Time one suspend and one resume."""
    return {"suspend": timed(backend.suspend), "resume": timed(backend.resume)}


@contextmanager
def backend_with(size_bytes: int, directory: Path) -> Iterator[tuple[CumemBackend, DeviceMemory]]:
    """Have a backend that writes everything in every round, with so much memory."""
    options = CumemOptions(tier="disk", disk_directory=directory, retention="none")
    backend = CumemBackend(options)
    try:
        with backend.region("weights") as region:
            memory = region.buffer(size_bytes)
        yield backend, memory
    finally:
        backend.close()


def measure(size_bytes: int, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Return the seconds of every round, by what was done."""
    seconds: dict[str, list[float]] = defaultdict(list)
    data = random.Random(0).randbytes(min(size_bytes, 64 << 20))  # noqa: S311 - no secret
    data = (data * -(-size_bytes // len(data)))[:size_bytes]
    with (
        backend_with(size_bytes, directory) as (backend, memory),
        ThreadPoolExecutor(ring.BUFFERS) as pool,
    ):
        memory.write(data)
        steps: list[Callable[[], dict[str, float]]] = [
            lambda: plain(size_bytes, directory, pool),
            lambda: ours(backend),
        ]
        for number in range(rounds + 1):
            for step in steps if number % 2 else reversed(steps):
                for name, value in step().items():
                    if number:  # the first round only makes the machine warm
                        seconds[name].append(value)
        if memory.read() != data:
            raise SystemExit("the bytes that came back are not the bytes that were saved")
    return seconds


def table(size_bytes: int, seconds: dict[str, list[float]]) -> str:
    """Return medians, their rates and the ratios of those, as a markdown table."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    lines = ["| | median s | best s | GiB/s | of the plain rate |", "|---|---|---|---|---|"]
    for name, value in median.items():
        other = AGAINST.get(name)
        ratio = f"{median[other] / value:.0%} ({other})" if other else ""
        rate = size_bytes / GIB / value
        lines.append(f"| {name} | {value:.3f} | {min(seconds[name]):.3f} | {rate:.2f} | {ratio} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=float, default=8.0, help="how much device memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="the option disk_directory")
    parser.add_argument("--json", type=Path, help="also write every round to this file")
    chosen = parser.parse_args(arguments)
    availability = CumemBackend.probe()
    if not availability.ok:
        raise SystemExit(f"the backend cumem does not work here: {availability.reason}")
    directory = choose_directory(chosen.directory, "--directory")
    size_bytes = int(chosen.gib * GIB)
    seconds = measure(size_bytes, chosen.rounds, directory)
    print(table(size_bytes, seconds))
    if chosen.json:
        result = {
            "size_bytes": size_bytes,
            "threads": ring.BUFFERS,
            "block_bytes": places.BUFFER_BYTES,
            "processors": os.cpu_count(),
            "seconds": seconds,
        }
        chosen.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
