"""What is done beside an engine leaves the graphs alone that it captures meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sleepbackends.vmm import copies, reclaim
from sleepbackends.vmm.arena import Arena
from sleepbackends.vmm.reclaim import Reclaim
from tests.cumem.test_backend import Make, filled, holds, make
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.cuda import Simulator
from tests.waiting import until

__all__ = ["make"]

SIZE = 40 * GRANULE_BYTES
OUT_OF_MEMORY = 2


@pytest.fixture(autouse=True)
def capture(simulator: Simulator, make: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is captured any more when backends are closed.

    The fixture of the simulator finds captures that were lost.
    """
    monkeypatch.setattr(copies, "CHUNK_BYTES", GRANULE_BYTES)
    yield
    simulator.set_capturing(False)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("where", ["memory", "disk", "not pinned"])
def test_staging(
    simulator: Simulator, make: Make, tmp_path: Path, where: str, background: bool
) -> None:
    backend = make(**({"tier": "disk", "disk_directory": tmp_path} if where == "disk" else {}))
    memory = filled(backend, "weights", SIZE, 1)
    if where == "not pinned":
        simulator.fail("cuMemHostRegister", OUT_OF_MEMORY, times=None)
    simulator.set_capturing(True)
    report = backend.stage(background=background, limit_gib_s=1000.0).wait(60)
    simulator.set_capturing(False)
    assert report.copied_bytes == SIZE
    slept = backend.suspend(1)
    assert (slept.clean_bytes, slept.copied_bytes) == (SIZE, 0)
    backend.resume()
    assert holds(memory, 1)


def test_a_thread_is_as_it_was_once_it_has_staged(simulator: Simulator, make: Make) -> None:
    backend = make()
    filled(backend, "weights", SIZE, 1)
    backend.stage(background=False).wait(60)
    simulator.set_capturing(True)
    with pytest.raises(Exception, match="STREAM_CAPTURE_UNSUPPORTED"):
        backend.driver.pin(0, GRANULE_BYTES)
    assert simulator.violations() == {"capture_lost": 1}
    simulator.reset()


def test_trimming(simulator: Simulator, make: Make) -> None:
    backend = make()
    filled(backend, "weights", SIZE, 1)
    backend.suspend(1)
    backend.resume()
    simulator.set_capturing(True)
    assert backend.trim() >= SIZE
    assert simulator.process_usage().pinned_bytes < SIZE


def test_giving_host_memory_back_in_the_background(simulator: Simulator, make: Make) -> None:
    arena = Arena(make().driver, None, "release")
    (slot,) = arena.take([SIZE])
    slot.ranges[0].wait()
    assert simulator.process_usage().pinned_bytes >= SIZE
    simulator.set_capturing(True)
    arena.give_back(slot)
    until(lambda: simulator.process_usage().pinned_bytes < SIZE)
    arena.close()


def test_sharing_copies(simulator: Simulator, make: Make, tmp_path: Path) -> None:
    backend = make(share_copies=True, share_directory=tmp_path)
    memory = filled(backend, "weights", SIZE, 1)
    backend.suspend(1)
    backend.resume()
    simulator.set_capturing(True)
    backend._share()
    until(lambda: backend._store.held_bytes == 0)
    simulator.set_capturing(False)
    backend.suspend(1)
    backend.resume()
    assert holds(memory, 1)


def test_reclaiming(simulator: Simulator, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "DELAY_S", 0.0)
    entered: list[object] = []
    backend = make()

    class Watched:
        def aside(self) -> object:
            entered.append("aside")
            return backend.driver.aside()

        def reclaim(self, device: int) -> None:
            entered.append(device)
            backend.driver.reclaim(device)

    watched: object = Watched()
    reclaims = Reclaim(watched)  # type: ignore[arg-type]  # all that it needs
    simulator.set_capturing(True)
    reclaims.soon([0])
    until(lambda: len(entered) == 2)
    reclaims.close()
    assert entered == ["aside", 0]
