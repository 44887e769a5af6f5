"""What a transition gave up is taken back by the driver before somebody waits for it."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import pytest

from sleepbackends.errors import DeviceMemoryError
from sleepbackends.vmm import reclaim
from sleepbackends.vmm.reclaim import Reclaim
from tests.cumem.test_backend import Make, filled, holds, make
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.cuda import Simulator
from tests.waiting import until

__all__ = ["make"]


@pytest.fixture(autouse=True)
def soon(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "DELAY_S", 0.05)


@pytest.mark.parametrize("verb", ["suspend", "discard"])
def test_memory_is_taken_and_given_back_on_every_device(
    simulator: Simulator, make: Make, verb: str
) -> None:
    backend = make()
    memory = [filled(backend, "weights", GRANULE_BYTES, 1, device) for device in range(2)]
    created = simulator.calls("cuMemCreate")
    if verb == "suspend":
        backend.suspend(1)
    else:
        backend.discard({"weights"})
    assert simulator.calls("cuMemCreate") == created, "not at once: that changes nothing"
    held = len(simulator.handles())
    until(lambda: simulator.calls("cuMemCreate") == created + 2)
    until(lambda: len(simulator.handles()) == held)
    backend.resume()
    if verb == "suspend":
        assert all(holds(each, 1) for each in memory)


def test_a_resume_comes_first(simulator: Simulator, make: Make) -> None:
    backend = make()
    filled(backend, "weights", GRANULE_BYTES, 1)
    backend.suspend(1)
    backend.resume()
    created = simulator.calls("cuMemCreate")
    time.sleep(0.15)
    assert simulator.calls("cuMemCreate") == created


def test_nothing_is_done_where_nothing_was_given_up(simulator: Simulator, make: Make) -> None:
    backend = make()
    filled(backend, "weights", GRANULE_BYTES, 1)
    created = simulator.calls("cuMemCreate")
    backend.suspend(0)
    backend.stage()
    time.sleep(0.15)
    assert simulator.calls("cuMemCreate") == created


def test_a_refusal_is_nobodys_problem(simulator: Simulator, make: Make) -> None:
    backend = make()
    memory = filled(backend, "weights", GRANULE_BYTES, 1)
    simulator.fail("cuMemCreate", 2)
    backend.suspend(1)
    created = simulator.calls("cuMemCreate")
    until(lambda: simulator.calls("cuMemCreate") > created)
    backend.resume()
    assert holds(memory, 1)


def test_closing_ends_it(simulator: Simulator, make: Make) -> None:
    backend = make()
    filled(backend, "weights", GRANULE_BYTES, 1)
    backend.suspend(1)
    created = simulator.calls("cuMemCreate")
    backend.close()
    time.sleep(0.15)
    assert simulator.calls("cuMemCreate") == created


def test_every_device_has_its_turn() -> None:
    class Full:
        def __init__(self) -> None:
            self.asked: list[int] = []

        def aside(self) -> AbstractContextManager[None]:
            return nullcontext()

        def reclaim(self, device: int) -> None:
            self.asked.append(device)
            raise DeviceMemoryError("others have it all")

    full = Full()
    work = Reclaim(full)  # type: ignore[arg-type] # that is all it uses
    work.soon([1, 0])
    until(lambda: sorted(full.asked) == [0, 1])
    work.soon([1])
    work.soon([0])
    until(lambda: len(full.asked) == 3)
    assert full.asked[2] == 0, "only the last request counts"
    work.soon([1])
    work.cancel()
    time.sleep(0.15)
    assert len(full.asked) == 3
    work.close()
    work.close()
