"""Raw memory of the xpu backend: pages, devices, room, closing."""

from __future__ import annotations

import pytest

from sleepbackends.control import Control
from sleepbackends.errors import (
    ClosedError,
    DeviceMemoryError,
    MechanismError,
    RequestError,
    TransitionTimeoutError,
)
from sleepbackends.mechanism import Fill
from sleepbackends.settings import BackendSettings
from sleepbackends.vmm import mover
from tests.simulators.level_zero import Simulator
from tests.xpu.fixtures import (
    DEVICE_LOST,
    DEVICES,
    LARGE_PAGE_BYTES,
    PAGE_BYTES,
    Make,
    filled,
    holds,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size_bytes", "expected_bytes"),
    [
        (1, PAGE_BYTES),
        (PAGE_BYTES + 1, 2 * PAGE_BYTES),
        (LARGE_PAGE_BYTES - 1, LARGE_PAGE_BYTES),
        (LARGE_PAGE_BYTES + 1, 2 * LARGE_PAGE_BYTES),
    ],
)
def test_pages_are_those_of_the_size(
    simulator: Simulator, make: Make, size_bytes: int, expected_bytes: int
) -> None:
    backend = make(share_below_bytes=0)
    memory = filled(backend, "weights", size_bytes, 1)
    assert simulator.usage("used_bytes") == backend.committed_bytes() == expected_bytes
    backend.suspend(1)
    assert simulator.usage("used_bytes") == backend.committed_bytes() == 0
    backend.resume()
    assert holds(memory, 1)


def test_a_driver_whose_pages_are_as_large_as_a_power_of_two(
    simulator: Simulator, make: Make
) -> None:
    simulator.set("page_bytes", 1)
    backend = make(share_below_bytes=0)
    filled(backend, "weights", 5 * MIB, 1)
    assert simulator.usage("used_bytes") == 8 * MIB


def test_small_pieces_of_a_tag_share_handles(simulator: Simulator, make: Make) -> None:
    backend = make()
    pieces = [filled(backend, "weights", PAGE_BYTES // 2, i) for i in range(64)]
    assert simulator.usage("handles") < 25
    backend.suspend(1)
    assert simulator.usage("used_bytes") == 0
    backend.resume()
    assert all(holds(piece, i) for i, piece in enumerate(pieces))


def test_two_devices_sleep_apart(simulator: Simulator, make: Make) -> None:
    backend = make()
    memory = [filled(backend, f"tag{d}", 5 * PAGE_BYTES, d + 1, d) for d in range(DEVICES)]
    backend.suspend(1)
    backend.resume(["tag1"])
    assert [simulator.usage("used_bytes", d) for d in range(DEVICES)] == [0, 5 * PAGE_BYTES]
    assert holds(memory[1], 2)
    backend.resume()
    assert holds(memory[0], 1)


def test_two_backends_share_a_context_and_nothing_else(simulator: Simulator, make: Make) -> None:
    first, second = make(), make()
    assert simulator.usage("contexts") == 1
    one, two = filled(first, "weights", 5000, 1), filled(second, "weights", 6000, 2)
    first.suspend(1)
    assert holds(two, 2)
    second.close()
    first.resume()
    assert holds(one, 1)
    assert holds(two, 2), "closing leaves mapped memory usable"


def test_after_close(simulator: Simulator, make: Make) -> None:
    backend = make()
    awake, asleep = filled(backend, "awake", 5000, 1), filled(backend, "asleep", 5000, 2)
    backend.discard(["asleep"])
    backend.close()
    assert holds(awake, 1)
    with pytest.raises(ClosedError):
        backend.allocate("awake", 1)
    for memory in (awake, asleep):
        memory.free()
    assert simulator.usage("reserved_bytes") == simulator.usage("handles") == 0


@pytest.mark.parametrize(("size_bytes", "device"), [(0, 0), (-1, 0), (1, DEVICES), (1, -1)])
def test_requests_that_make_no_sense(make: Make, size_bytes: int, device: int) -> None:
    backend = make()
    with pytest.raises(RequestError) as caught:
        backend.allocate("weights", size_bytes, device)
    if size_bytes == 1:
        assert "ZE_AFFINITY_MASK" in caught.value.hint
    assert backend.state().mapped_bytes == 0


@pytest.mark.parametrize("size_bytes", [9 << 30, (1 << 63) - 1])
def test_more_than_there_is(simulator: Simulator, make: Make, size_bytes: int) -> None:
    backend = make()
    with pytest.raises((DeviceMemoryError, MechanismError)) as caught:
        backend.allocate("weights", size_bytes)
    assert isinstance(caught.value, DeviceMemoryError)
    assert caught.value.needed_bytes == size_bytes
    assert caught.value.available_bytes == 8 << 30
    assert simulator.usage("reserved_bytes") == 0
    assert holds(filled(backend, "weights", 100, 3), 3)


def test_no_room_to_wake_up_leaves_everything_asleep(simulator: Simulator, make: Make) -> None:
    backend = make(share_below_bytes=0)
    memory = [filled(backend, "weights", PAGE_BYTES, i) for i in range(4)]
    backend.suspend(1)
    asleep = backend.state()
    simulator.set("total_bytes", 3 * PAGE_BYTES)
    with pytest.raises(DeviceMemoryError) as caught:
        backend.resume()
    assert caught.value.needed_bytes == 4 * PAGE_BYTES
    assert backend.state() == asleep
    assert simulator.usage("used_bytes") == 0
    simulator.set("total_bytes", 4 * PAGE_BYTES)
    backend.resume()
    assert all(holds(each, i) for i, each in enumerate(memory))


@pytest.mark.parametrize("fill", list(Fill))
def test_fill_covers_what_is_allocated_later_too(make: Make, fill: Fill) -> None:
    backend = make(BackendSettings(fill=fill))
    memory = filled(backend, "kv_cache", 3 * PAGE_BYTES, 1)
    backend.suspend(1)
    backend.resume()
    assert holds(memory, {Fill.ZERO: 0, Fill.POISON: 0xA5, Fill.NONE: 0xD7}[fill])


def test_a_margin_is_kept_by_the_least_of_both_books(simulator: Simulator, make: Make) -> None:
    backend = make(share_below_bytes=0)
    simulator.set("frozen", 1)  # the device says that everything is free
    backend.keep_free((8 << 30) - 3 * PAGE_BYTES)
    memory = [filled(backend, "weights", PAGE_BYTES, i) for i in range(3)]
    with pytest.raises(DeviceMemoryError):
        filled(backend, "weights", PAGE_BYTES, 9)
    backend.suspend(1)
    backend.resume()
    assert all(holds(each, i) for i, each in enumerate(memory))


def test_a_deadline_in_the_middle(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "GROUP_BYTES", {"down": 1, "up": 1})
    backend = make(share_below_bytes=0)
    memory = [filled(backend, "weights", PAGE_BYTES, i) for i in range(6)]

    class Third(Control):
        def remaining_s(self) -> float | None:
            return 0.0 if self.progress.done_bytes >= 3 * PAGE_BYTES else 3600.0

    for call in (lambda c: backend.suspend(1, control=c), lambda c: backend.resume(control=c)):
        before = backend.state()
        with pytest.raises(TransitionTimeoutError):
            call(Third(timeout_s=3600.0))
        assert backend.state() == before
        backend.suspend(1)
    backend.resume()
    assert all(holds(each, i) for i, each in enumerate(memory))


def test_a_device_that_is_lost_in_the_middle_of_a_copy(simulator: Simulator, make: Make) -> None:
    backend = make()
    filled(backend, "weights", 5000, 1)
    simulator.fail("queuedCopy", DEVICE_LOST)
    with pytest.raises(MechanismError, match="DEVICE_LOST") as caught:
        backend.suspend(1)
    assert not caught.value.recoverable
    assert "restart the process" in caught.value.hint


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_host_memory_that_cannot_be_imported(simulator: Simulator, make: Make, tier: str) -> None:
    simulator.set("import_limit_bytes", 0)
    backend = make(tier=tier)
    memory = filled(backend, "weights", 5 * MIB, 7)
    for _ in range(2):
        backend.suspend(1)
        assert simulator.usage("used_bytes") == 0
        backend.resume()
        assert holds(memory, 7)
