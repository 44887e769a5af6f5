"""A fault at every call of every driver function: state true, bytes safe, nothing leaked."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.errors import MechanismError, NoRoomError
from sleepbackends.residency import Residency
from sleepbackends.vmm import mover
from sleepbackends.vmm.region import DeviceMemory
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.cuda import Simulator

REFUSED, NO_ROOM = 1, 2
FUNCTIONS = [
    *("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"),
    *("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemsetD8Async", "cuMemGetInfo"),
    *("cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventSynchronize"),
    *("cuStreamCreate", "cuStreamSynchronize", "cuCtxSynchronize"),
    *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuMemHostRegister"),
]
SIZES = [("weights", 0, 3), ("weights", 1, 2), ("kv_cache", 0, 2), ("kv_cache", 1, 1)]
"""Tag, device and granules; odd bytes are added."""


@dataclass
class Scene:
    """A backend with memory of two tags on two devices, and what must be in it."""

    backend: CumemBackend
    kept: dict[DeviceMemory, bytes]
    dropped: list[DeviceMemory]

    def check_state(self, simulator: Simulator) -> None:
        """The ledger says of every block what the driver says of its mapping."""
        mapped = {mapping.address for mapping in simulator.mappings()}
        self.backend.state()
        for block in self.backend.ledger.blocks():
            assert block.placement.mapped == (block.address in mapped)
        handles = simulator.handles()
        assert len(handles) == len(mapped), "physical memory that nothing is mapped to"

    def check_bytes(self) -> None:
        for memory, data in self.kept.items():
            assert memory.read() == data

    def take_apart(self, simulator: Simulator) -> None:
        for memory in [*self.kept, *self.dropped]:
            memory.free()
        self.backend.close()
        usage = simulator.process_usage()
        assert usage.reserved_bytes == usage.pinned_bytes == usage.queued_operations == 0
        assert simulator.device_usage(0).live_handles == 0
        assert simulator.device_usage(1).live_handles == 0


def make_scene() -> Scene:
    backend = CumemBackend(CumemOptions(share_below_bytes=0, retention="none"))
    kept, dropped = {}, []
    source = random.Random(3)  # noqa: S311 - test data
    for tag, device, granules in SIZES:
        with backend.region(tag, device) as region:
            memory = region.buffer(granules * GRANULE_BYTES - 100)
        data = source.randbytes(memory.size_bytes)
        memory.write(data)
        if tag == "weights":
            kept[memory] = data
        else:
            dropped.append(memory)
    return Scene(backend, kept, dropped)


def asleep(scene: Scene) -> None:
    scene.backend.suspend(1)


def awake(scene: Scene) -> None:
    pass


CALLS: dict[str, tuple[Callable[[Scene], None], Callable[[CumemBackend], object]]] = {
    "suspend": (awake, lambda backend: backend.suspend(1)),
    "resume": (asleep, lambda backend: backend.resume()),
    "discard": (awake, lambda backend: backend.discard(["kv_cache"])),
}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "GROUP_BYTES", {"down": GRANULE_BYTES, "up": GRANULE_BYTES})


@pytest.mark.parametrize("times", [1, None], ids=lambda times: f"times={times}")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", CALLS)
def test_at_every_call(simulator: Simulator, name: str, function: str, times: int | None) -> None:
    prepare, call = CALLS[name]
    error = NO_ROOM if function in ("cuMemCreate", "cuMemHostRegister") else REFUSED
    for nth in range(1, 60):
        scene = make_scene()
        prepare(scene)
        before, calls = scene.backend.state(), simulator.calls(function)
        simulator.fail(function, error, nth, times)
        failed = False
        try:
            call(scene.backend)
        except (MechanismError, NoRoomError) as caught:
            failed = True
            assert caught.report is not None
            assert caught.recoverable
            after = {tag: change.after for tag, change in caught.report.tags.items()}
            simulator.clear_faults()
            assert after == dict(scene.backend.state().tags)
            if name == "resume" and times == 1:
                assert scene.backend.state() == before, "a failed resume left something awake"
        fired = simulator.calls(function) - calls >= nth
        simulator.clear_faults()
        finish(scene, simulator, call, failed)
        if not fired:
            return
    pytest.fail(f"{function} is called more often than this test expects")


def finish(
    scene: Scene, simulator: Simulator, call: Callable[[CumemBackend], object], failed: bool
) -> None:
    backend = scene.backend
    if failed:
        call(backend)
    backend.mark_valid([])  # what could not be given back goes at the end of the next call
    scene.check_state(simulator)
    if Residency.OFFLOADED in backend.state().tags["weights"].residencies:
        backend.resume()
    scene.check_bytes()
    backend.resume()
    for memory in scene.dropped:
        memory.read()
    scene.check_state(simulator)
    scene.take_apart(simulator)
