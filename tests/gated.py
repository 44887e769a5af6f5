"""A simulated backend whose copies wait until a test lets them go on."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any

import pytest

from sleepbackends import Control, Orchestrator
from sleepbackends.config import SleepConfig
from sleepbackends.ledger import Block
from sleepbackends.testing import FakeEngine, SimulatedBackend, SimulatedOptions

SIZE = 1000
TAGS = ("weights", "lora", "kv_cache")


class Gate:
    """Stops a thread at a place: ``reached`` says that it is there, ``open`` lets it on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.open.wait(30), "the test forgot to open the gate"


class GatedBackend(SimulatedBackend):
    """Waits at ``saving`` after the first saved block and at ``restoring`` before one."""

    saving: Gate | None = None
    restoring: Gate | None = None

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        for block in super().save(blocks, control):
            yield block
            if self.saving is not None:
                self.saving.pass_through()
                control.check()

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        if self.restoring is not None:
            self.restoring.pass_through()
        yield from super().restore(blocks, control)


def make(
    options: SimulatedOptions | None = None, **config: object
) -> tuple[Orchestrator, GatedBackend, FakeEngine]:
    """An orchestrator over weights, lora and kv_cache."""
    sleep_config = SleepConfig(**config)  # type: ignore[arg-type]
    backend = GatedBackend(options, sleep_config.settings)
    for tag in TAGS:
        with backend.region(tag) as region:
            region.buffer(SIZE).write(tag[:1].encode() * SIZE)
    engine = FakeEngine()
    return Orchestrator(backend, config=sleep_config, hooks=engine.hooks()), backend, engine


def run_uvloop(main: Coroutine[Any, Any, None]) -> None:
    """As ``asyncio.run``, on uvloop; skips the test where that is not installed."""
    if sys.version_info < (3, 11):
        main.close()
        pytest.skip("asyncio.Runner is new in Python 3.11")
    else:
        try:
            uvloop = pytest.importorskip("uvloop")
        except BaseException:
            main.close()
            raise
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)
