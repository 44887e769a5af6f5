"""Measure what it costs to look for changes, and what each block costs beside its driver calls.

First: every byte changed before each of ten suspends in a row, with fingerprints and without,
in turn, in one process. Then: a suspend that finds everything clean, a resume, and a discard of
many blocks, with the time inside the native library and the driver taken away.

    python benchmarks/clean_sleep.py --gib 16 --blocks 1000 4000
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.mechanism import Fill
from sleepbackends.settings import BackendSettings

GIB, MIB = 1 << 30, 1 << 20
BLOCK_BYTES = 2 * MIB


def timed(call: Callable[[], object]) -> float:
    """Return how many seconds a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@contextmanager
def without_fingerprints(backend: CumemBackend) -> Iterator[None]:
    """Have the driver tell none meanwhile."""
    driver: Any = backend._driver
    driver.fingerprint = lambda device, spans: None
    try:
        yield
    finally:
        del driver.fingerprint


def dirty(gib: int, steps: int) -> str:
    """Compare suspends of memory that changed altogether; return the line that says it."""
    import torch

    backend = CumemBackend()
    with backend.region("weights"):
        tensors = [torch.zeros(GIB // 4, dtype=torch.int32, device="cuda") for _ in range(gib)]
    backend.suspend(1)
    backend.resume()
    seconds = defaultdict(list)

    def step(name: str) -> None:
        for tensor in tensors:
            tensor.add_(1)
        torch.cuda.synchronize()
        seconds[name].append(timed(backend.suspend))
        backend.resume()

    for number in range(2 * steps):
        if number % 2:
            step("with")
        else:
            with without_fingerprints(backend):
                step("without")
    if any(int(tensor[-1]) != 2 * steps for tensor in tensors):
        raise SystemExit("the weights are not what they were")
    backend.close()
    looking, blind = median(seconds["with"]), median(seconds["without"])
    return (
        f"{gib} GiB, every byte changed, medians of {steps} suspends each: {looking:.4f} s with "
        f"fingerprints, {blind:.4f} s without ({looking / blind - 1:+.1%})."
    )


class Inside:
    """Adds up the time that one thread spends in functions, and what timing them costs."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.seconds = 0.0
        self.calls = 0
        nothing = self.wrap(lambda: None)
        count = 100_000
        whole = timed(lambda: [nothing() for _ in range(count)])
        self._cost_s = (whole - self.seconds) / count
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.seconds, self.calls = 0.0, 0

    def outside(self, whole_s: float) -> float:
        """Return how much of some time was spent elsewhere."""
        return whole_s - self.seconds - self.calls * self._cost_s

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.calls += 1
                self.seconds += time.perf_counter() - started

        return call


class Native:
    """The native library with every call timed."""

    def __init__(self, library: Any, inside: Inside) -> None:
        self._library = library
        self._inside = inside

    def __getattr__(self, name: str) -> Any:
        function = self._inside.wrap(getattr(self._library, name))
        setattr(self, name, function)
        return function


def bookkeeping(count: int, rounds: int) -> dict[str, float]:
    """Return microseconds a block beside the calls, the least of some rounds."""
    settings = BackendSettings(fill=Fill.NONE)
    backend = CumemBackend(CumemOptions(share_below_bytes=0), settings)
    with backend.region("weights") as region:
        kept = [region.buffer(BLOCK_BYTES) for _ in range(count)]
    inside = Inside()
    backend._space._native = Native(backend._space._native, inside)
    driver: Any = backend._driver
    driver.call = inside.wrap(driver.call)
    found: dict[str, float] = {}

    def measure(name: str, call: Callable[[], object]) -> None:
        inside.reset()
        us = inside.outside(timed(call)) / count * 1e6
        found[name] = min(us, found.get(name, us))

    backend.suspend(1)
    backend.resume()
    for _ in range(rounds):
        measure("clean suspend", backend.suspend)
        measure("resume", backend.resume)
        measure("discard", lambda: backend.discard({"weights"}))
        measure("resume of what was discarded", backend.resume)
        backend.mark_valid({"weights"})
        backend.suspend(1)
        backend.resume()
    del kept
    backend.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/clean_sleep.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gib", type=int, default=16, help="how much memory changes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--blocks", type=int, nargs="*", default=[1000, 4000])
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    if min(chosen.gib, chosen.steps, chosen.rounds, *chosen.blocks) < 1:
        parser.error("all sizes and numbers must be positive")
    found = CumemBackend.probe()
    if not found.ok:
        raise SystemExit(f"nothing can be measured here: {found.reason} ({found.hint})")
    print(dirty(chosen.gib, chosen.steps))
    if not chosen.blocks:
        return
    print()
    tables = {count: bookkeeping(count, chosen.rounds) for count in chosen.blocks}
    print("Microseconds a block of 2 MiB, beside native and driver calls:")
    print()
    print(f"| | {' | '.join(f'{count} blocks' for count in tables)} |")
    print("|---" * (len(tables) + 1) + "|")
    for name in next(iter(tables.values())):
        print(f"| {name} | {' | '.join(f'{each[name]:.1f}' for each in tables.values())} |")


if __name__ == "__main__":
    main()
