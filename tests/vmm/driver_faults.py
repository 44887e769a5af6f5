"""A fault at every call of every driver function: state true, bytes safe, nothing leaked.

The same for each driver: what a test class has to say is how its simulator is asked.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from sleepbackends.errors import MechanismError, NoRoomError
from sleepbackends.residency import Residency
from sleepbackends.vmm import mover
from sleepbackends.vmm.region import DeviceMemory
from sleepbackends.vmm.torch_backend import AnyTorchVmmBackend

GRANULE_BYTES = 64 << 10
SIZES = [
    ("weights", 0, 3),
    ("weights", 0, 1),
    ("weights", 1, 2),
    ("kv_cache", 0, 2),
    ("kv_cache", 1, 1),
]
"""Tag, device and granules; odd bytes are added."""


@dataclass
class Scene:
    """A backend with memory of two tags on two devices, and what must be in it."""

    backend: AnyTorchVmmBackend
    kept: dict[DeviceMemory, bytes]
    dropped: list[DeviceMemory]

    @classmethod
    def of(cls, backend: AnyTorchVmmBackend) -> Scene:
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
        return cls(backend, kept, dropped)

    def check_bytes(self) -> None:
        for memory, data in self.kept.items():
            assert memory.read() == data


def asleep(scene: Scene) -> None:
    scene.backend.suspend(1)


def awake(scene: Scene) -> None:
    pass


CALLS: dict[str, tuple[Callable[[Scene], None], Callable[[AnyTorchVmmBackend], object]]] = {
    "suspend": (awake, lambda backend: backend.suspend(1)),
    "resume": (asleep, lambda backend: backend.resume()),
    "discard": (awake, lambda backend: backend.discard(["kv_cache"])),
}


class DriverFaultTests(ABC):
    """Subclass it, and parametrize ``function`` over the driver's functions."""

    refused: ClassVar[int]
    no_room: ClassVar[int]
    out_of_room: ClassVar[tuple[str, ...]]
    """The functions that can fail for lack of room."""

    @abstractmethod
    def make_backend(self) -> AnyTorchVmmBackend:
        """Return a backend with a block for each allocation, which keeps no copies."""

    @abstractmethod
    def mapped(self, simulator: Any) -> set[int]:
        """Return where memory is mapped."""

    @abstractmethod
    def handles(self, simulator: Any) -> int:
        """Return how many pieces of physical memory there are."""

    @abstractmethod
    def check_nothing_is_held(self, simulator: Any) -> None:
        """Check that nothing of the backend is left in the driver."""

    @pytest.fixture(autouse=True)
    def _small_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mover, "GROUP_BYTES", {"down": GRANULE_BYTES, "up": GRANULE_BYTES})

    def check_at_every_call(
        self, simulator: Any, name: str, function: str, times: int | None
    ) -> None:
        prepare, call = CALLS[name]
        error = self.no_room if function in self.out_of_room else self.refused
        for nth in range(1, 99):
            scene = Scene.of(self.make_backend())
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
            self._finish(scene, simulator, call, failed)
            if not fired:
                return
        pytest.fail(f"{function} is called more often than this test expects")

    def _finish(
        self,
        scene: Scene,
        simulator: Any,
        call: Callable[[AnyTorchVmmBackend], object],
        failed: bool,
    ) -> None:
        backend = scene.backend
        if failed:
            call(backend)
        backend.mark_valid([])  # what could not be given back goes at the end of the next call
        self._check_state(scene, simulator)
        if Residency.OFFLOADED in backend.state().tags["weights"].residencies:
            backend.resume()
        scene.check_bytes()
        backend.resume()
        for memory in scene.dropped:
            memory.read()
        self._check_state(scene, simulator)
        for memory in [*scene.kept, *scene.dropped]:
            memory.free()
        backend.close()
        self.check_nothing_is_held(simulator)

    def _check_state(self, scene: Scene, simulator: Any) -> None:
        """The ledger says of every block what the driver says of its mapping."""
        mapped = self.mapped(simulator)
        scene.backend.state()
        for block in scene.backend.ledger.blocks():
            assert block.placement.mapped == (block.address in mapped)
        assert self.handles(simulator) == len(mapped), "physical memory that nothing is mapped to"
