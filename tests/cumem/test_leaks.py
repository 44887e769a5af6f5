"""Many cycles with allocation and freeing from four threads: every byte, and nothing left."""

from __future__ import annotations

import random
import threading
from typing import Literal

import pytest

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.settings import BackendSettings
from sleepbackends.vmm import mover, places
from sleepbackends.vmm.region import DeviceMemory
from tests.native.fixtures import DEVICES, GRANULE_BYTES
from tests.simulators.cuda import Simulator

THREADS, SLOTS = 4, 6
KEPT = TagPolicy(Policy.OFFLOAD, Policy.OFFLOAD)
PINNED = TagPolicy(Policy.KEEP, Policy.KEEP)


class Churn(threading.Thread):
    """Allocates and frees: bytes of an awake tag are checked at once, others when awake."""

    def __init__(self, backend: CumemBackend, number: int, stop: threading.Event) -> None:
        super().__init__()
        self.backend, self.stop, self.number = backend, stop, number
        self.random = random.Random(number)  # noqa: S311 - test data
        self.awake: dict[DeviceMemory, bytes] = {}
        self.moving: dict[DeviceMemory, bytes] = {}
        self.error: BaseException | None = None
        self.rounds = 0

    def allocate(self, tag: str, into: dict[DeviceMemory, bytes], write: bool) -> None:
        with self.backend.region(tag, self.number % DEVICES) as region:
            memory = region.buffer(self.random.randint(1, 3 * GRANULE_BYTES))
        into[memory] = self.random.randbytes(memory.size_bytes) if write else b""
        if write:
            memory.write(into[memory])

    def drop(self, held: dict[DeviceMemory, bytes]) -> None:
        if len(held) >= SLOTS:
            memory = self.random.choice(list(held))
            del held[memory]
            memory.free()

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.drop(self.awake)
                self.allocate("runtime", self.awake, write=True)
                memory = self.random.choice(list(self.awake))
                assert memory.read() == self.awake[memory]
                # What moves may be asleep: only its coming and going is random here.
                self.drop(self.moving)
                self.allocate("scratch", self.moving, write=False)
                self.rounds += 1
        except BaseException as error:  # noqa: BLE001 - raised where the thread is joined
            self.error = error

    def end(self) -> None:
        self.join(60)
        assert self.error is None, self.error
        assert self.rounds

    def free_all(self) -> None:
        for memory in [*self.awake, *self.moving]:
            memory.free()


def load(backend: CumemBackend, source: random.Random) -> dict[DeviceMemory, bytes]:
    weights = {}
    for number in range(12):
        with backend.region("weights", number % DEVICES) as region:
            memory = region.buffer(source.randint(1, 4 * GRANULE_BYTES))
        weights[memory] = source.randbytes(memory.size_bytes)
        memory.write(weights[memory])
    return weights


@pytest.mark.parametrize(
    ("share_below_bytes", "cycles", "tier"),
    [(0, 40, "memory"), (8 * GRANULE_BYTES, 200, "memory"), (8 * GRANULE_BYTES, 40, "disk")],
)
def test_nothing_is_left(
    simulator: Simulator,
    monkeypatch: pytest.MonkeyPatch,
    share_below_bytes: int,
    cycles: int,
    tier: Literal["memory", "disk"],
) -> None:
    monkeypatch.setattr(places, "BUFFER_BYTES", GRANULE_BYTES)
    monkeypatch.setattr(mover, "GROUP_BYTES", {"down": GRANULE_BYTES, "up": GRANULE_BYTES})
    policies = Policies({"weights": KEPT, "scratch": KEPT, "runtime": PINNED})
    backend = CumemBackend(
        CumemOptions(share_below_bytes=share_below_bytes, tier=tier),
        BackendSettings(policies=policies),
    )
    stop, source = threading.Event(), random.Random(5)  # noqa: S311 - test data
    weights = load(backend, source)
    churns = [Churn(backend, number, stop) for number in range(THREADS)]
    for churn in churns:
        churn.start()
    largest = []
    for cycle in range(cycles):
        if cycle % 4 == 3:
            backend.discard(["scratch"])
        else:
            backend.suspend(1)
        if source.random() < 0.3:
            backend.resume(["weights"])
        backend.resume()
        changed = source.choice(list(weights))
        assert changed.read() == weights[changed]
        weights[changed] = source.randbytes(changed.size_bytes)
        changed.write(weights[changed])
        extents = backend._space.extents()
        largest.append(sum(extent.size_bytes for extent in extents))
    stop.set()
    for churn in churns:
        churn.end()
    # Pieces of up to four granules that come and go, 12 and 48 of them at most.
    assert max(largest) < 800 * GRANULE_BYTES, "it grew from one transition to the next"
    for memory, data in [*weights.items(), *(i for churn in churns for i in churn.awake.items())]:
        assert memory.read() == data
    for memory in weights:
        memory.free()
    for churn in churns:
        churn.free_all()
    assert not backend.ledger.blocks()
    assert backend._store.used_bytes == 0
    backend.close()
    check_nothing_is_held(simulator)


def check_nothing_is_held(simulator: Simulator) -> None:
    usage = simulator.process_usage()
    assert usage.reserved_bytes == usage.pinned_bytes == usage.live_streams == 0
    assert usage.live_events == 0
    for device in range(DEVICES):
        assert simulator.device_usage(device).live_handles == 0
        assert simulator.device_usage(device).live_mappings == 0
