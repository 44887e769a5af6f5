"""What blocks and steps cost beside native and driver calls: little, however many there are."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.mechanism import Fill
from sleepbackends.settings import BackendSettings
from sleepbackends.vmm import staging
from tests.cumem.test_backend import Make, make
from tests.native.fixtures import GRANULE_BYTES

__all__ = ["make"]

MOST_US = 16.0
"""A block; three to twenty times what it takes where this was written."""

MOST_STEP_US = 600.0
"""A step of a few chunks."""

STEP_CHUNKS = 4

MOST_GROWTH = 1.5
"""From few to many."""

NOISE_US = 1.0
"""What caches and neighbours add to a block that costs next to nothing."""

FEW, MANY = 400, 3200

ROUNDS = 3


class Outside:
    """Measures what this thread computes outside of native and driver calls."""

    def __init__(self, backend: CumemBackend) -> None:
        self.calls = 0
        self._inside_s = 0.0
        self._thread_id = threading.get_ident()
        library: Any = backend._space._native
        native = type("Native", (), {})()
        for name in vars(library):
            if name.startswith("sb_"):
                setattr(native, name, self._timed(getattr(library, name)))
        backend._space._native = native
        driver: Any = backend._driver
        driver.call = self._timed(driver.call)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.calls += 1
                if threading.get_ident() == self._thread_id:
                    self._inside_s += time.thread_time() - started

        return call

    def us(self, call: Callable[[], object]) -> float:
        self._inside_s, started = 0.0, time.thread_time()
        call()
        return (time.thread_time() - started - self._inside_s) * 1e6


def least(found: dict[str, float], name: str, us: float) -> None:
    found[name] = min(us, found.get(name, us))


def a_block(backend: CumemBackend, count: int) -> dict[str, float]:
    """Return microseconds a block of each kind of transition."""
    with backend.region("weights", 0) as region:
        memory = [region.buffer(GRANULE_BYTES) for _ in range(count)]
    outside = Outside(backend)
    found: dict[str, float] = {}

    def measure(name: str, call: Callable[[], object]) -> None:
        least(found, name, outside.us(call) / count)

    backend.suspend(1)
    backend.resume()
    for number in range(ROUNDS):
        measure("clean suspend", lambda: backend.suspend(1))
        measure("resume", backend.resume)
        for each in memory:
            ctypes.memset(each.address, number + 1, 1)
        measure("dirty suspend", lambda: backend.suspend(1))
        backend.resume()
        measure("discard", lambda: backend.discard({"weights"}))
        measure("resume of what was discarded", backend.resume)
        backend.mark_valid({"weights"})
        backend.suspend(1)
        backend.resume()
    return found


def test_a_block_costs_little_and_no_more_among_many(make: Make) -> None:
    settings = BackendSettings(fill=Fill.NONE)
    few = a_block(make(settings, share_below_bytes=0), FEW)
    many = a_block(make(settings, share_below_bytes=0), MANY)
    slow = {name: us for name, us in many.items() if us >= MOST_US}
    grown = {
        name: (few[name], us)
        for name, us in many.items()
        if us > MOST_GROWTH * few[name] + NOISE_US
    }
    assert not slow
    assert not grown


def test_native_calls_are_made_for_many_blocks_at_once(make: Make) -> None:
    backend = make(BackendSettings(fill=Fill.NONE), share_below_bytes=0)
    with backend.region("weights", 0) as region:
        memory = [region.buffer(GRANULE_BYTES) for _ in range(FEW)]
    backend.suspend(1)
    backend.resume()
    outside = Outside(backend)

    def calls(call: Callable[[], object]) -> int:
        outside.calls = 0
        call()
        return outside.calls

    assert calls(backend.suspend) < FEW / 2
    assert FEW < calls(backend.resume) < 1.25 * FEW, "a copy each"
    assert calls(lambda: backend.discard({"weights"})) < FEW / 8
    assert calls(backend.resume) < FEW / 8
    assert len(memory) == FEW


def a_step(backend: CumemBackend, count: int) -> dict[str, float]:
    """Return microseconds of its thread for each step of a staging of so many blocks."""
    with backend.region("weights", 0) as region:
        memory = [region.buffer(GRANULE_BYTES) for _ in range(count)]
    outside = Outside(backend)
    found: dict[str, float] = {}

    def measure(name: str) -> None:
        stage = partial(backend.stage, background=False, limit_gib_s=1 << 30)
        least(found, name, outside.us(stage) / (count / STEP_CHUNKS))

    for number in range(ROUNDS):
        for each in memory:
            ctypes.memset(each.address, number + 1, 1)
        measure("dirty")
        measure("clean")
    return found


def test_a_step_of_staging_costs_the_engine_little_among_many_blocks(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STEP_CHUNKS", STEP_CHUNKS)
    few = a_step(make(share_below_bytes=0), 100)
    many = a_step(make(share_below_bytes=0), 1000)
    assert max(many.values()) < MOST_STEP_US
    grown = {
        name: (few[name], us)
        for name, us in many.items()
        if us > MOST_GROWTH * few[name] + NOISE_US
    }
    assert not grown
