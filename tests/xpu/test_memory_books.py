"""How much memory there is: what the device says, and what our own books say."""

from __future__ import annotations

import pytest

from sleepbackends.xpu import sysman
from sleepbackends.xpu.driver import XpuDriver
from tests.simulators.level_zero import Simulator
from tests.xpu.fixtures import PAGE_BYTES, UNKNOWN, UNSUPPORTED_FEATURE, Make, filled

TOTAL_BYTES = 8 << 30


def others_take(simulator: Simulator, size_bytes: int) -> None:
    """Let memory be gone that our books know nothing of."""
    simulator.set("taken_bytes", size_bytes)


def test_the_device_knows_what_others_took(simulator: Simulator, make: Make) -> None:
    backend = make(share_below_bytes=0)
    filled(backend, "weights", PAGE_BYTES, 1)
    others_take(simulator, 5 * PAGE_BYTES)
    assert backend.driver.free_bytes(0) == TOTAL_BYTES - 6 * PAGE_BYTES
    assert backend.driver.free_bytes(1) == TOTAL_BYTES


def test_our_books_know_what_we_took_where_the_device_stands_still(
    simulator: Simulator, make: Make
) -> None:
    simulator.set("frozen", 1)
    backend = make(share_below_bytes=0)
    memory = filled(backend, "weights", PAGE_BYTES, 1)
    assert backend.driver.free_bytes(0) == TOTAL_BYTES - PAGE_BYTES
    backend.suspend(1)
    assert backend.driver.free_bytes(0) == TOTAL_BYTES
    backend.resume()
    memory.free()
    assert backend.committed_bytes() == 0


def test_a_device_that_stops_answering(simulator: Simulator, make: Make) -> None:
    backend = make(share_below_bytes=0)
    filled(backend, "weights", PAGE_BYTES, 1)
    simulator.fail("zesMemoryGetState", UNKNOWN, times=None)
    assert backend.driver.free_bytes(0) == TOTAL_BYTES - PAGE_BYTES


@pytest.mark.parametrize("why", ["nobody asked for it", "it fails", "too many modules"])
def test_without_system_management(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "nobody asked for it":
        monkeypatch.delenv("ZES_ENABLE_SYSMAN")
        simulator.fail("zesInit", UNSUPPORTED_FEATURE, times=None)
    elif why == "it fails":
        simulator.set("sysman", 0)
    else:
        monkeypatch.setattr(sysman, "MAX_MODULES", 0)
    driver = XpuDriver()
    others_take(simulator, PAGE_BYTES)
    assert driver.free_bytes(0) == TOTAL_BYTES
    assert simulator.calls("zesMemoryGetState") == 0
