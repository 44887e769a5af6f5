"""Many cycles under random allocation and freeing leave nothing behind and lose nothing."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sleepbackends import Orchestrator
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.errors import SuspendedError

from .helpers import MIB, SLACK, drop_caches, free_device_bytes, holds, pattern

CYCLES = 200
THREADS = 4
WARM_UP_CYCLES = 20
TAGS = ("weights", "kv_cache", "lora")
SIZES = (4, 4096, 100_000, MIB, 3 * MIB, 9 * MIB, 24 * MIB, 70 * MIB)
MOST_TENSORS = 24
HOST_SLACK = 192 * MIB
"""What Python, torch and the driver may keep, while a cycle moves about a GiB."""


@dataclass(frozen=True)
class Figures:
    """What this process takes up, in bytes."""

    device: int
    resident: int
    address_space: int

    @classmethod
    def now(cls) -> Figures:
        drop_caches()
        text = Path("/proc/self/status").read_text()
        kib = dict(re.findall(r"^(VmRSS|VmSize):\s+(\d+) kB$", text, flags=re.MULTILINE))
        used = torch.cuda.mem_get_info()[1] - free_device_bytes()
        return cls(used, int(kib["VmRSS"]) << 10, int(kib["VmSize"]) << 10)


class Worker(threading.Thread):
    """Allocates, rewrites, checks and frees at random; uses memory only when admitted."""

    def __init__(self, backend: CumemBackend, orchestrator: Orchestrator, number: int) -> None:
        super().__init__(name=f"worker{number}")
        self.checked = 0
        self.failure: BaseException | None = None
        self._backend = backend
        self._orchestrator = orchestrator
        self._random = random.Random(number)  # noqa: S311 - test data, not a secret
        self._held: list[tuple[str, torch.Tensor, int, int]] = []
        self._stop_asked = threading.Event()

    def run(self) -> None:
        try:
            while not self._stop_asked.is_set():
                self._free_some()
                try:
                    with self._orchestrator.use(holder=self.name):
                        self._random.choice((self._allocate, self._check_one))()
                except SuspendedError:
                    self._stop_asked.wait(0.005)
            with self._orchestrator.use(holder=self.name):
                for held in self._held:
                    self._check(*held)
            self._held.clear()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.failure = error

    def finish(self) -> None:
        self._stop_asked.set()
        self.join(120)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure

    def _free_some(self) -> None:
        """Whatever is asleep or awake, and whatever transition goes on."""
        while self._held and (len(self._held) > MOST_TENSORS or self._random.random() < 0.2):
            self._held.pop(self._random.randrange(len(self._held)))
            if self._random.random() < 0.1:
                torch.cuda.empty_cache()

    def _allocate(self) -> None:
        tag, size = self._random.choice(TAGS), self._random.choice(SIZES)
        seed = self._random.randrange(1 << 30)
        with self._backend.region(tag):
            for _ in range(self._random.randrange(1, 4)):
                tensor = pattern(size, seed)
                self._held.append((tag, tensor, seed, self._epoch(tag)))

    def _check_one(self) -> None:
        if not self._held:
            return
        index = self._random.randrange(len(self._held))
        tag, tensor, seed, epoch = self._held[index]
        self._check(tag, tensor, seed, epoch)
        seed = self._random.randrange(1 << 30)
        tensor.copy_(pattern(tensor.nbytes, seed))
        self._held[index] = (tag, tensor, seed, self._epoch(tag))

    def _check(self, tag: str, tensor: torch.Tensor, seed: int, epoch: int) -> None:
        if self._epoch(tag) == epoch:
            assert holds(tensor, seed), f"{tensor.nbytes} bytes of {tag} differ"
        else:
            assert tag == "kv_cache", f"contents of {tag} were dropped"
            assert not tensor.any(), "dropped contents come back as zeros"
        self.checked += 1

    def _epoch(self, tag: str) -> int:
        return self._backend.state().tags[tag].epoch


def sleep_and_wake(orchestrator: Orchestrator) -> None:
    orchestrator.sleep(1)
    orchestrator.wake_up()


def wake_in_two_steps(orchestrator: Orchestrator) -> None:
    orchestrator.sleep(1)
    orchestrator.wake_up(["weights"])
    orchestrator.wake_up()


def release_the_cache(orchestrator: Orchestrator) -> None:
    orchestrator.release_kv_cache()
    orchestrator.wake_up()


STEPS: list[Callable[[Orchestrator], None]] = [
    sleep_and_wake,
    sleep_and_wake,
    wake_in_two_steps,
    release_the_cache,
]


def soak(cycles: int) -> int:
    """Run so many cycles over a new backend; return how many tensors were checked."""
    backend = CumemBackend(CumemOptions(retention="release"))
    chance = random.Random(0)  # noqa: S311 - test data, not a secret
    with Orchestrator(backend) as orchestrator:
        for tag in TAGS:
            backend.open_tag(tag)
        workers = [Worker(backend, orchestrator, number) for number in range(THREADS)]
        for worker in workers:
            worker.start()
        try:
            for _ in range(cycles):
                chance.choice(STEPS)(orchestrator)
                # Long enough for the workers to be admitted in between.
                threading.Event().wait(0.02)
        finally:
            for worker in workers:
                worker.finish()
        drop_caches()
        assert all(tag.blocks == 0 for tag in backend.state().tags.values())
    return sum(worker.checked for worker in workers)


def test_nothing_stays_behind_and_nothing_is_lost() -> None:
    soak(WARM_UP_CYCLES)
    before = Figures.now()
    checked = soak(CYCLES)
    after = Figures.now()
    assert checked > 2 * CYCLES
    assert after.device - before.device < SLACK, (before, after)
    assert after.resident - before.resident < HOST_SLACK, (before, after)
    assert after.address_space - before.address_space < HOST_SLACK, (before, after)
