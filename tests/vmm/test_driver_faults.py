"""A fault at every call of every function of the CUDA driver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.vmm.packing import packer
from tests.cumem.test_contract import Weights
from tests.simulators.cuda import Simulator
from tests.vmm import driver_faults
from tests.vmm.driver_faults import CALLS, DriverFaultTests, Scene

FUNCTIONS = [
    *("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"),
    *("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemsetD8Async", "cuMemGetInfo"),
    *("cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventSynchronize"),
    *("cuStreamCreate", "cuStreamSynchronize", "cuCtxSynchronize"),
    *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuMemHostRegister"),
]
PACKED = [
    *(name for name in FUNCTIONS if not name.startswith("cuCtx")),
    *("cuCtxSynchronize", "cuStreamWaitEvent", "cuLaunchKernel", "cuMemAddressReserve"),
]


class TestCumem(DriverFaultTests):
    refused, no_room = 1, 2
    out_of_room: ClassVar[tuple[str, ...]] = ("cuMemCreate", "cuMemHostRegister")

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


class TestPacked(TestCumem):
    """What is kept is packed, by kernels and through memory that can be refused too."""

    out_of_room: ClassVar[tuple[str, ...]] = (*TestCumem.out_of_room, "cuMemAddressReserve")

    @pytest.fixture(autouse=True)
    def _packed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packer, "LEAST_BYTES", 1)
        monkeypatch.setattr(packer, "MOST_SLOTS", 2)
        monkeypatch.setattr(driver_faults, "random", SimpleNamespace(Random=Weights))

    @pytest.mark.parametrize("times", [1, None], ids=lambda times: f"times={times}")
    @pytest.mark.parametrize("function", PACKED)
    @pytest.mark.parametrize("name", ["suspend", "resume"])
    def test_at_every_call(
        self, simulator: Simulator, name: str, function: str, times: int | None
    ) -> None:
        self.check_at_every_call(simulator, name, function, times)

    def test_it_packs(self, simulator: Simulator) -> None:
        scene = Scene.of(self.make_backend())
        assert scene.backend.suspend(1).spared_bytes > 0
