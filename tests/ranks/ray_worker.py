"""The actor of the tests with Ray, in a module that Ray's workers can import."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import ray

from sleepbackends import Control
from sleepbackends.ranks import Answer, Command, Rank
from tests.ranks.parts import CONTENTS, Parts, host


class Worker:
    """An actor of an engine."""

    def __init__(self, number: int) -> None:
        self.part: Parts = host(number)
        self.rank = Rank(self.part.backend)
        self.gate = threading.Event()

    @ray.method(concurrency_group="sleepbackends")
    def sleepbackends_rank(self, command: Command) -> Answer:
        return self.rank.answer(command)

    def break_at(self, faults: dict[str, Any]) -> int:
        return self.part.break_at(faults)

    def holds(self) -> bool:
        return all(self.part.holds(tag) for tag in CONTENTS)

    def pid(self) -> int:
        return os.getpid()

    def die_on_save(self) -> None:
        self.part.backend.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    def hang_on_save(self) -> None:
        real = self.part.backend.save

        def save(blocks: Any, control: Control) -> Any:
            self.gate.wait(30)
            return real(blocks, control)

        self.part.backend.save = save

    def go_on(self) -> None:
        self.gate.set()
