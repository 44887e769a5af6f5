"""A margin that allocations leave free."""

from __future__ import annotations

import pytest

from sleepbackends.errors import DeviceMemoryError, MechanismError, RequestError
from tests.cumem.test_backend import Make, filled, holds, make
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.cuda import Simulator

__all__ = ["make"]


@pytest.mark.parametrize("share_below_bytes", [0, 64 * GRANULE_BYTES])
def test_allocations_stop_at_the_margin(
    simulator: Simulator, make: Make, share_below_bytes: int
) -> None:
    backend = make(share_below_bytes=share_below_bytes)
    simulator.set_budget_bytes(8 * GRANULE_BYTES)
    backend.keep_free(4 * GRANULE_BYTES)
    memory = [filled(backend, "weights", GRANULE_BYTES, i) for i in range(4)]
    with pytest.raises(DeviceMemoryError):
        filled(backend, "weights", GRANULE_BYTES, 9)
    assert simulator.device_usage().used_bytes == 4 * GRANULE_BYTES
    memory.pop().free()
    memory.append(filled(backend, "weights", GRANULE_BYTES, 3))
    backend.keep_free(5 * GRANULE_BYTES)
    backend.suspend(1)
    backend.resume()
    assert all(holds(each, i) for i, each in enumerate(memory)), "waking up takes what it needs"
    backend.keep_free(0)
    filled(backend, "weights", 2 * GRANULE_BYTES, 9)


def test_less_free_than_the_margin_is_no_room_at_all(simulator: Simulator, make: Make) -> None:
    backend = make()
    simulator.set_budget_bytes(GRANULE_BYTES)
    backend.keep_free(1 << 62)
    with pytest.raises(DeviceMemoryError):
        filled(backend, "weights", 1, 1)


def test_a_margin_is_of_one_backend(simulator: Simulator, make: Make) -> None:
    careful, other = make(), make()
    careful.keep_free(1 << 62)
    assert holds(filled(other, "weights", 100, 7), 7)


def test_what_the_device_has_may_not_be_known(simulator: Simulator, make: Make) -> None:
    from cuda.bindings.driver import CUresult

    backend = make()
    backend.keep_free(1)
    simulator.fail("cuMemGetInfo", CUresult.CUDA_ERROR_UNKNOWN, times=None)
    with pytest.raises(MechanismError, match="UNKNOWN"):
        filled(backend, "weights", 100, 7)
    assert simulator.device_usage().used_bytes == 0
    simulator.clear_faults()
    assert holds(filled(backend, "weights", 100, 7), 7)


def test_a_negative_margin_is_refused(simulator: Simulator, make: Make) -> None:
    with pytest.raises(RequestError):
        make().keep_free(-1)
