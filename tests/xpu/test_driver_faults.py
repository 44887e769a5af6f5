"""A fault at every call of every function of Level Zero."""

from __future__ import annotations

import pytest

from sleepbackends.xpu.backend import XpuBackend
from sleepbackends.xpu.options import XpuOptions
from tests.simulators.level_zero import Simulator
from tests.vmm.driver_faults import CALLS, DriverFaultTests
from tests.xpu.fixtures import INVALID_ARGUMENT, OUT_OF_DEVICE_MEMORY, check_nothing_is_held

FUNCTIONS = [
    *("zePhysicalMemCreate", "zeVirtualMemMap", "zeVirtualMemUnmap", "zePhysicalMemDestroy"),
    *("zeCommandListAppendMemoryCopy", "zeCommandListAppendMemoryFill"),
    *("zeCommandListAppendBarrier", "zeCommandListCreateImmediate"),
    *("zeEventPoolCreate", "zeEventCreate", "zeEventHostReset", "zeEventHostSynchronize"),
    *("zeEventQueryStatus", "zesMemoryGetState", "zexDriverImportExternalPointer"),
    "zeDeviceGetCommandQueueGroupProperties",
]


class TestXpu(DriverFaultTests):
    refused, no_room = INVALID_ARGUMENT, OUT_OF_DEVICE_MEMORY
    out_of_room = ("zePhysicalMemCreate", "zexDriverImportExternalPointer")

    def make_backend(self) -> XpuBackend:
        return XpuBackend(XpuOptions(share_below_bytes=0, retention="none"))

    def mapped(self, simulator: Simulator) -> set[int]:
        return set(simulator.mappings())

    def handles(self, simulator: Simulator) -> int:
        return simulator.usage("handles")

    def check_nothing_is_held(self, simulator: Simulator) -> None:
        check_nothing_is_held(simulator)
        for name in ("reserved_bytes", "handles"):
            assert simulator.usage(name) == 0, name

    @pytest.mark.parametrize("times", [1, None], ids=lambda times: f"times={times}")
    @pytest.mark.parametrize("function", FUNCTIONS)
    @pytest.mark.parametrize("name", CALLS)
    def test_at_every_call(
        self, simulator: Simulator, name: str, function: str, times: int | None
    ) -> None:
        self.check_at_every_call(simulator, name, function, times)
