"""Compare the cumem backend's disk tier with plain direct reads and writes of the same directory.

In each round as many bytes are written to an unnamed file and read back by as many threads, in
blocks as large, as the backend's, and suspended and resumed by the backend; which goes first
alternates. Both keep their file from round to round, as the backend does unless told otherwise:
making one, and deleting one with its gigabytes, is in no time. Every byte changes before each
suspend, so that all of them are written. Medians of all rounds are printed. The backend's times
hold its fingerprints and the copies from and to the device too.

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.hostmemory.directory import choose_directory
from sleepbackends.hostmemory.driver import round_up
from sleepbackends.vmm import places, ring
from sleepbackends.vmm.saved_file import UNIT_BYTES, SavedFile

GIB = 1 << 30
AGAINST = {"suspend": "plain write", "resume": "plain read"}


def timed(call: Callable[[], object]) -> float:
    """Return how many seconds a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Plain:
    """Threads that take the blocks of a file in turn, each from memory of its own.

    Parameters
    ----------
    size_bytes : int
        How much is written and read.
    directory : Path
        Where the file is.
    """

    def __init__(self, size_bytes: int, directory: Path) -> None:
        self._size_bytes = round_up(size_bytes, UNIT_BYTES)
        self._directory = directory
        self._buffers = [mmap.mmap(-1, places.BUFFER_BYTES) for _ in range(ring.BUFFERS)]
        for number, buffer in enumerate(self._buffers):
            # Not zeros, which some disks do not store.
            buffer.write(random.Random(number).randbytes(len(buffer)))  # noqa: S311 - no secret
        self._pool = ThreadPoolExecutor(len(self._buffers))
        self._file = SavedFile(directory, self._size_bytes, direct=True)

    def times(self) -> dict[str, float]:
        """Time writing the file and reading it back."""
        return {
            "plain write": timed(lambda: self._every(self._file.write)),
            "plain read": timed(lambda: self._every(self._file.read)),
        }

    def _every(self, do: Callable[[memoryview, int], object]) -> None:
        block_bytes = places.BUFFER_BYTES

        def some(number: int) -> None:
            first, step = number * block_bytes, len(self._buffers) * block_bytes
            for offset in range(first, self._size_bytes, step):
                with memoryview(self._buffers[number]) as data:
                    do(data[: self._size_bytes - offset], offset)

        list(self._pool.map(some, range(len(self._buffers))))

    def close(self) -> None:
        """End the threads and delete the file."""
        self._pool.shutdown()
        if not self._file.is_direct:
            where = self._directory
            print(f"note: {where} takes no direct I/O, the page cache is part of all times")
        self._file.close()


class Ours:
    """A backend with so much memory.

    Parameters
    ----------
    size_bytes : int
        How much.
    directory : Path
        The option ``disk_directory``.
    """

    def __init__(self, size_bytes: int, directory: Path) -> None:
        self._backend = CumemBackend(CumemOptions(tier="disk", disk_directory=directory))
        with self._backend.region("weights") as region:
            self._memory = region.buffer(size_bytes)
        self._rounds = 0

    def times(self) -> dict[str, float]:
        """Time one suspend and one resume of bytes that are new."""
        data = contents(self._memory.size_bytes, self._rounds)
        self._rounds += 1
        self._memory.write(data)
        copied_bytes: list[int] = []
        found = {
            "suspend": timed(lambda: copied_bytes.append(self._backend.suspend().copied_bytes)),
            "resume": timed(self._backend.resume),
        }
        if copied_bytes != [len(data)]:
            raise SystemExit(f"{copied_bytes} of {len(data)} bytes were saved, not all")
        if self._memory.read() != data:
            raise SystemExit("the bytes that came back are not the bytes that were saved")
        return found

    def close(self) -> None:
        """Give everything back."""
        self._backend.close()


def contents(size_bytes: int, seed: int) -> bytes:
    """Return bytes that differ from those of another seed in every block."""
    data = random.Random(seed).randbytes(min(size_bytes, 64 << 20))  # noqa: S311 - no secret
    return (data * -(-size_bytes // len(data)))[:size_bytes]


def measure(size_bytes: int, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Return the seconds of every round, by what was done."""
    seconds: dict[str, list[float]] = defaultdict(list)
    with (
        closing(Ours(size_bytes, directory)) as ours,
        closing(Plain(size_bytes, directory)) as plain,
    ):
        steps = [plain.times, ours.times]
        for number in range(rounds + 1):
            for step in steps if number % 2 else reversed(steps):
                for name, value in step().items():
                    if number:  # the first round makes the files, and the machine warm
                        seconds[name].append(value)
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
