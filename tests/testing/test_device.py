from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise

import pytest

from sleepbackends import DeviceMemoryError, MechanismError, Residency
from sleepbackends.settings import BackendSettings
from sleepbackends.testing import (
    HeldCall,
    InjectedFault,
    SimulatedBackend,
    SimulatedDevice,
    SimulatedOptions,
)

SIZE = 4096


def residency(backend: SimulatedBackend, tag: str) -> Residency:
    (only,) = backend.state().tags[tag].residencies
    return only


def allocate(backend: SimulatedBackend, tag: str) -> None:
    with backend.region(tag) as region:
        region.buffer(SIZE).write(tag[:1].encode() * SIZE)


def test_memory_that_was_just_mapped_is_stale(sleep_device: SimulatedDevice) -> None:
    start = sleep_device.reserve_range(4)
    sleep_device.stale_byte = 7
    sleep_device.map(start, 4)
    assert sleep_device.read(start) == b"\7\7\7\7"
    with pytest.raises(RuntimeError, match="mapped already"):
        sleep_device.map(start, 4)


def test_what_is_not_mapped_cannot_be_touched(sleep_device: SimulatedDevice) -> None:
    start = sleep_device.reserve_range(4)
    for touch in (sleep_device.read, sleep_device.unmap, sleep_device.memory):
        with pytest.raises(RuntimeError, match="illegal access"):
            touch(start)
    with pytest.raises(RuntimeError, match="illegal access"):
        sleep_device.write(start, b"data")


def test_ranges_do_not_overlap_and_are_not_handed_out_again(sleep_device: SimulatedDevice) -> None:
    with ThreadPoolExecutor(4) as pool:
        starts = sorted(pool.map(sleep_device.reserve_range, [10] * 100))
    assert all(after - before >= 10 for before, after in pairwise(starts))
    assert sleep_device.used_bytes == 0, "a range is not memory"


def test_the_budget_is_shared_and_a_resume_waits_for_a_neighbour() -> None:
    device = SimulatedDevice(budget_bytes=SIZE)
    options = SimulatedOptions(device=device)
    one = SimulatedBackend(options, BackendSettings(wait_for_memory_s=30.0))
    other = SimulatedBackend(options)
    allocate(one, "weights")
    one.suspend(1)
    allocate(other, "weights")
    with pytest.raises(DeviceMemoryError) as caught:
        allocate(other, "lora")
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (SIZE, 0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.resume)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        other.suspend(1)
        assert waiting.result(30).changed
    assert device.used_bytes == SIZE


def test_a_call_fails_where_it_was_told_to_and_nowhere_else(
    sleep_device: SimulatedDevice, sleep_backend: SimulatedBackend
) -> None:
    allocate(sleep_backend, "weights")
    allocate(sleep_backend, "lora")
    sleep_device.fail("read", at=[1])
    with pytest.raises(MechanismError, match="read was told to fail") as caught:
        sleep_backend.suspend(1)
    assert isinstance(caught.value.__cause__, InjectedFault)
    assert residency(sleep_backend, "weights") is Residency.RESIDENT
    assert sleep_backend.suspend(1).changed
    sleep_device.fail("write", make_error=OSError)
    sleep_device.fail("write", at=[])
    assert sleep_backend.resume().changed, "what was told last counts"


def test_a_slow_call_takes_its_time(
    sleep_device: SimulatedDevice, sleep_backend: SimulatedBackend
) -> None:
    allocate(sleep_backend, "weights")
    sleep_device.slow("read", 0.05)
    started = time.perf_counter()
    sleep_backend.suspend(1)
    assert time.perf_counter() - started >= 0.05


def test_a_held_call_waits_until_it_is_let_go(
    sleep_device: SimulatedDevice, sleep_backend: SimulatedBackend
) -> None:
    allocate(sleep_backend, "weights")
    with ThreadPoolExecutor(1) as pool, sleep_device.hold("unmap") as held:
        running = pool.submit(sleep_backend.suspend, 1)
        assert isinstance(held, HeldCall)
        assert held.wait_until_entered()
        assert residency(sleep_backend, "weights") is Residency.RESIDENT
        assert not running.done()
        held.let_go()
        assert running.result(30).changed


@pytest.mark.parametrize("tell", ["fail", "slow", "hold"])
def test_a_call_that_there_is_not_is_refused(sleep_device: SimulatedDevice, tell: str) -> None:
    told: dict[str, Callable[[], object]] = {
        "fail": lambda: sleep_device.fail("copy"),
        "slow": lambda: sleep_device.slow("copy", 1.0),
        "hold": lambda: ExitStack().enter_context(sleep_device.hold("copy")),
    }
    with pytest.raises(ValueError, match=r"no call 'copy'; known: \('map'"):
        told[tell]()
