"""Measure what coordination of ranks adds to a transition, and how it grows with their number.

Every rank is a backend of this process with one block of each tag. A certain time passes in
each of its copies, as it would on a device. What coordination adds is the time of the group
less the time of the same ranks when each moves by itself in a thread of its own, in the same
run and in turn.

::

    python -m benchmarks.ranks                           # the tables of docs/performance.md
    python -m benchmarks.ranks --ranks 64 --backend simulated
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Literal

from sleepbackends.base import BaseBackend
from sleepbackends.control import Control
from sleepbackends.host.backend import HostBackend
from sleepbackends.host.options import HostOptions
from sleepbackends.ledger import Block
from sleepbackends.ranks import InProcessGroup
from sleepbackends.testing import SimulatedBackend

RANKS = (8, 64, 512)
TAGS = ("weights", "kv_cache")
SIZE_BYTES = 4096
VERBS = ("suspend", "resume", "discard")
Kind = Literal["simulated", "host"]


class _Slow:
    """Lets time pass in every copy."""

    latency_s = 0.0

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        time.sleep(self.latency_s)
        return super().save(blocks, control)  # type: ignore[misc, no-any-return]

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        time.sleep(self.latency_s)
        return super().restore(blocks, control)  # type: ignore[misc, no-any-return]


class SlowSimulated(_Slow, SimulatedBackend):
    """Simulated memory with slow copies."""


class SlowHost(_Slow, HostBackend):
    """Memory of this process with slow copies."""


def make_ranks(kind: Kind, count: int, latency_s: float) -> list[BaseBackend[Any]]:
    """Make backends that hold one block of each tag."""
    ranks: list[BaseBackend[Any]] = []
    for _ in range(count):
        backend: Any = SlowSimulated() if kind == "simulated" else SlowHost(HostOptions(threads=1))
        backend.latency_s = latency_s
        backend.kept = []
        for tag in TAGS:
            with backend.region(tag) as region:
                backend.kept.append(region.buffer(SIZE_BYTES))
        ranks.append(backend)
    return ranks


def measure(
    kind: Kind, count: int, latency_s: float = 0.02, rounds: int = 5
) -> dict[str, dict[str, float]]:
    """Return by verb the medians, in milliseconds, and what coordination adds to them.

    Parameters
    ----------
    kind : {"simulated", "host"}
        The backend of every rank.
    count : int
        How many ranks.
    latency_s : float
        How long every copy takes at least.
    rounds : int
        How often each is done, coordinated and not, in turn.
    """
    times: dict[str, dict[str, list[float]]] = {verb: {"group": [], "alone": []} for verb in VERBS}
    backends = make_ranks(kind, count, latency_s)
    with closing(InProcessGroup(backends)) as group, ThreadPoolExecutor(count) as pool:

        def together(call: Callable[[Any], object]) -> None:
            call(group)

        def each_alone(call: Callable[[Any], object]) -> None:
            list(pool.map(call, backends))

        for _ in range(rounds + 1):  # the first warms up
            for way, do in (("group", together), ("alone", each_alone)):
                for verb, call in _cycle():
                    started = time.perf_counter()
                    do(call)
                    if verb:
                        times[verb][way].append(1e3 * (time.perf_counter() - started))
    return {
        verb: _row({way: ms[1:] for way, ms in of.items()}, count) for verb, of in times.items()
    }


def _cycle() -> Iterator[tuple[str, Callable[[Any], object]]]:
    yield "suspend", lambda backend: backend.suspend(1)
    yield "resume", lambda backend: backend.resume()
    yield "discard", lambda backend: backend.discard(["kv_cache"])
    yield "", lambda backend: backend.resume()


def _row(times: dict[str, list[float]], count: int) -> dict[str, float]:
    group, alone = (statistics.median(times[way]) for way in ("group", "alone"))
    return {
        "group_ms": group,
        "alone_ms": alone,
        "added_ms": group - alone,
        # The best of each: whatever else is at work on the machine only makes them longer.
        "best_added_ms": (best := min(times["group"]) - min(times["alone"])),
        "best_added_per_rank_ms": best / count,
    }


def markdown(kind: Kind, found: Mapping[int, Mapping[str, Mapping[str, float]]]) -> str:
    """Write one table."""
    lines = [
        f"| {kind} ranks | call | group, ms | each alone, ms | added, ms | at best | a rank, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for count, verbs in found.items():
        lines += [
            f"| {count} | {verb} | {row['group_ms']:.1f} | {row['alone_ms']:.1f} "
            f"| {row['added_ms']:.1f} | {row['best_added_ms']:.1f} "
            f"| {row['best_added_per_rank_ms']:.3f} |"
            for verb, row in verbs.items()
        ]
    return "\n".join(lines)


def allow_many_files() -> None:
    """Raise the soft limit of open files: every host backend keeps one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16), hard))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What coordination of ranks adds.")
    parser.add_argument("--ranks", type=int, action="append", help=f"by default {RANKS}")
    parser.add_argument("--backend", choices=["simulated", "host"], action="append")
    parser.add_argument("--latency-ms", type=float, default=20.0, help="of every copy")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    allow_many_files()
    for kind in asked.backend or ["simulated", "host"]:
        found = {
            count: measure(kind, count, asked.latency_ms / 1e3, asked.rounds)
            for count in asked.ranks or RANKS
        }
        print(json.dumps({kind: found}) if asked.json else markdown(kind, found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
