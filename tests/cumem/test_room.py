"""Room on the device and on the host: other processes, refusals, budgets, retention."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sleepbackends.control import Control
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.errors import DeviceMemoryError, HostMemoryError, TransitionTimeoutError
from sleepbackends.residency import Residency
from sleepbackends.settings import BackendSettings
from sleepbackends.vmm import arena, places
from tests.cumem.test_backend import Make, filled, holds, make
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.cuda import SharedDevices, Simulator
from tests.simulators.cuda.driving import elsewhere

__all__ = ["make"]

KIB = 1 << 10
MIB = 1 << 20

# They count bytes of the device to the last one.
pytestmark = pytest.mark.usefixtures("no_fingerprints")


@pytest.fixture
def neighbour(
    simulator: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SharedDevices]:
    path = tmp_path / "shared"
    monkeypatch.setenv("SIMULATED_CUDA_SHARED", str(path))
    simulator.set_total_bytes(16 * MIB)
    shared = SharedDevices(path)
    yield shared
    shared.close()


def hog(path: Path) -> subprocess.Popen[str]:
    """Another process that holds 12 MiB until its input ends."""
    process = elsewhere(
        "cuda.create(12 << 20); print('ready', flush=True); input()", 16 * MIB, path
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def leave(process: subprocess.Popen[str]) -> None:
    process.communicate("go\n")


def test_a_neighbour_in_the_way(simulator: Simulator, neighbour: SharedDevices, make: Make) -> None:
    backend = make(share_below_bytes=0)
    memory = [filled(backend, "weights", 4 * MIB, i) for i in range(2)]
    backend.suspend(1)
    asleep = backend.state()
    process = hog(neighbour.path)
    try:
        with pytest.raises(DeviceMemoryError) as caught:
            backend.resume()
        assert caught.value.needed_bytes == 8 * MIB
        assert caught.value.available_bytes == 4 * MIB, "counted after all was given back"
        assert f"{4 * MIB} are available" in str(caught.value)
        assert "cuda:0" in str(caught.value)
        assert caught.value.tags == {"weights"}
        assert backend.state() == asleep
        assert simulator.device_usage().used_bytes == 0
    finally:
        leave(process)
    backend.resume()
    assert all(holds(each, i) for i, each in enumerate(memory))


def test_waiting_for_a_neighbour(neighbour: SharedDevices, make: Make) -> None:
    backend = make(BackendSettings(wait_for_memory_s=30.0))
    memory = filled(backend, "weights", 8 * MIB, 1)
    backend.suspend(1)
    process = hog(neighbour.path)
    threading.Timer(0.2, leave, [process]).start()
    started = time.monotonic()
    backend.resume()
    assert 0.1 < time.monotonic() - started < 20
    assert holds(memory, 1)


def test_waiting_ends(simulator: Simulator, make: Make) -> None:
    backend = make(BackendSettings(wait_for_memory_s=0.1))
    filled(backend, "weights", 8 * MIB, 1)
    backend.suspend(1)
    simulator.set_budget_bytes(MIB)
    with pytest.raises(DeviceMemoryError) as caught:
        backend.resume()
    assert "waited 0.1 s" in "".join(caught.value.__notes__)
    with pytest.raises(TransitionTimeoutError):
        CumemBackend.resume(backend, control=Control(timeout_s=0.03))
    simulator.set_budget_bytes(None)
    backend.resume()


def test_a_shared_extent_is_no_larger_than_there_is_room(simulator: Simulator, make: Make) -> None:
    simulator.set_total_bytes(100 * GRANULE_BYTES)
    backend = make()
    for _ in range(100):
        filled(backend, "weights", GRANULE_BYTES, 1)
    assert simulator.device_usage().free_bytes == 0


def test_allocating_during_a_transition_is_not_generous_each_time(
    simulator: Simulator, make: Make
) -> None:
    backend = make()
    for _ in range(64):
        filled(backend, "weights", GRANULE_BYTES, 1)
    backend._space.begin()
    before = simulator.device_usage().used_bytes
    for _ in range(8):
        filled(backend, "weights", GRANULE_BYTES, 2)
    grown = simulator.device_usage().used_bytes - before
    backend._space.end()
    assert grown <= 20 * GRANULE_BYTES


def test_pinning_is_refused(
    simulator: Simulator, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    simulator.set_pinned_limit_bytes(0)
    backend = make(retention="none")
    memory = filled(backend, "weights", 5 * MIB, 1)
    before = simulator.process_usage().pageable_copy_bytes
    backend.suspend(1)
    backend.resume()
    assert simulator.process_usage().pageable_copy_bytes - before == 10 * MIB
    assert holds(memory, 1)
    assert "refuses to pin" in caplog.text
    simulator.set_pinned_limit_bytes(None)
    before = simulator.process_usage().pageable_copy_bytes
    backend.suspend(1)
    backend.resume()
    assert simulator.process_usage().pageable_copy_bytes == before, "refused for ever"
    assert holds(memory, 1)


@pytest.mark.parametrize("buffers", [1, 3])
def test_what_is_not_pinned_goes_through_buffers_that_are(
    simulator: Simulator, make: Make, monkeypatch: pytest.MonkeyPatch, buffers: int
) -> None:
    monkeypatch.setattr(places, "BUFFER_BYTES", 64 * KIB)
    simulator.set_pinned_limit_bytes(buffers * 64 * KIB)
    backend = make(retention="none")
    memory = [filled(backend, "weights", 5 * MIB + 7, 1 + device, device) for device in (0, 1)]
    before = simulator.process_usage().pageable_copy_bytes
    for _ in range(2):
        backend.suspend(1)
        assert 0 < simulator.process_usage().pinned_bytes <= buffers * 64 * KIB
        backend.resume()
        assert simulator.process_usage().pinned_bytes == 0, "kept although it is not retained"
    assert simulator.process_usage().pageable_copy_bytes == before
    assert holds(memory[0], 1)
    assert holds(memory[1], 2)


def test_no_host_memory_for_a_chunk(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    memory = filled(backend, "weights", 5 * MIB, 1)

    def refuse(address: int, size_bytes: int) -> None:
        raise HostMemoryError("no memory", needed_bytes=size_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(arena, "touch", refuse)
        with pytest.raises(HostMemoryError, match="no memory"):
            backend.suspend(1)
    assert holds(memory, 1)
    backend.suspend(1)
    backend.resume()
    assert holds(memory, 1)


def test_the_budget_is_checked_before_anything_changes(make: Make) -> None:
    backend = make(host_budget_bytes=4 * MIB)
    weights, kv_cache = filled(backend, "weights", 5 * MIB, 1), filled(backend, "kv_cache", 99, 2)
    with pytest.raises(HostMemoryError) as caught:
        backend.suspend(1)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (5 * MIB, 4 * MIB)
    assert holds(weights, 1)
    assert holds(kv_cache, 2)
    assert backend.suspend(2).changed


@pytest.mark.parametrize(("retention", "kept_bytes"), [("retain", 5 * MIB), ("none", 0)])
def test_retention(simulator: Simulator, make: Make, retention: str, kept_bytes: int) -> None:
    backend = make(retention=retention)
    memory = filled(backend, "weights", 5 * MIB, 1)
    for _ in range(3):
        backend.suspend(1)
        assert simulator.process_usage().pinned_bytes == 5 * MIB
        backend.resume()
        assert simulator.process_usage().pinned_bytes == kept_bytes
    registered = simulator.calls("cuMemHostRegister")
    assert registered == (1 if kept_bytes else 3)
    assert backend.trim() == kept_bytes
    assert holds(memory, 1)


def test_released_in_the_background(simulator: Simulator, make: Make) -> None:
    backend = make(retention="release")
    filled(backend, "weights", 5 * MIB, 1)
    backend.suspend(1)
    backend.resume()
    give_up = time.monotonic() + 10
    while simulator.process_usage().pinned_bytes and time.monotonic() < give_up:
        time.sleep(0.01)
    assert simulator.process_usage().pinned_bytes == 0


def test_closing_asleep(simulator: Simulator, make: Make) -> None:
    backend = CumemBackend(CumemOptions())
    memory = filled(backend, "weights", 5 * MIB, 1)
    backend.suspend(1)
    backend.close()
    assert simulator.process_usage().pinned_bytes == 0
    assert backend.state().tags["weights"].residencies == {Residency.DISCARDED}
    memory.free()
    assert simulator.process_usage().reserved_bytes == 0
