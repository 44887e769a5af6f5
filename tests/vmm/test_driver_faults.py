"""A fault at every call of every function of the CUDA driver."""

from __future__ import annotations

import pytest

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from tests.simulators.cuda import Simulator
from tests.vmm.driver_faults import CALLS, DriverFaultTests

FUNCTIONS = [
    *("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"),
    *("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemsetD8Async", "cuMemGetInfo"),
    *("cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventSynchronize"),
    *("cuStreamCreate", "cuStreamSynchronize", "cuCtxSynchronize"),
    *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuMemHostRegister"),
]


class TestCumem(DriverFaultTests):
    refused, no_room = 1, 2
    out_of_room = ("cuMemCreate", "cuMemHostRegister")

    def make_backend(self) -> CumemBackend:
        return CumemBackend(CumemOptions(share_below_bytes=0, retention="none"))

    def mapped(self, simulator: Simulator) -> set[int]:
        return {mapping.address for mapping in simulator.mappings()}

    def handles(self, simulator: Simulator) -> int:
        return len(simulator.handles())

    def check_nothing_is_held(self, simulator: Simulator) -> None:
        usage = simulator.process_usage()
        assert usage.reserved_bytes == usage.pinned_bytes == usage.queued_operations == 0
        assert simulator.device_usage(0).live_handles == 0
        assert simulator.device_usage(1).live_handles == 0

    @pytest.mark.parametrize("times", [1, None], ids=lambda times: f"times={times}")
    @pytest.mark.parametrize("function", FUNCTIONS)
    @pytest.mark.parametrize("name", CALLS)
    def test_at_every_call(
        self, simulator: Simulator, name: str, function: str, times: int | None
    ) -> None:
        self.check_at_every_call(simulator, name, function, times)
