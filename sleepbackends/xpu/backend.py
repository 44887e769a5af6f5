"""The xpu backend: virtual memory of Intel GPUs by tag, through torch or without it."""

from __future__ import annotations

from dataclasses import replace

from sleepbackends.availability import Availability
from sleepbackends.settings import BackendSettings
from sleepbackends.vmm.address_space import AddressSpace
from sleepbackends.vmm.backend import VmmBackend
from sleepbackends.vmm.torch_backend import TorchVmmBackend
from sleepbackends.xpu.accelerator import XPU
from sleepbackends.xpu.driver import XpuDriver
from sleepbackends.xpu.loader import LIBRARY
from sleepbackends.xpu.options import XpuOptions
from sleepbackends.xpu.probing import probe
from sleepbackends.xpu.torch_pools import XpuPools

__all__ = ["XpuBackend"]


class XpuBackend(TorchVmmBackend[XpuOptions, XpuDriver, XpuPools]):
    """Unmaps memory of Intel GPUs and maps it again at the same addresses; see its base class.

    With a torch that has XPU devices, memory is made in torch's context.
    """

    name = "xpu"
    accelerator = XPU
    driver_library = LIBRARY
    native = "level_zero"
    options_type = XpuOptions

    capabilities = replace(
        VmmBackend.capabilities,
        # oneCCL was never tried on memory that was mapped again.
        preserves_communicators=False,
        preserves_graphs_with_communicators=False,
    )

    def __init__(
        self, options: XpuOptions | None = None, settings: BackendSettings | None = None
    ) -> None:
        super().__init__(options, settings)
        # Without fingerprints a suspend copies everything, whatever was copied ahead.
        stages = self.driver.computes_fingerprints
        self.capabilities = replace(type(self).capabilities, supports_staging=stages)

    @classmethod
    def probe(cls) -> Availability:
        """Tell whether there is a device whose virtual memory passes a test; never raises."""
        return probe()

    def _open_driver(self) -> XpuDriver:
        return XpuDriver(XPU.torch_if_there())

    def _make_pools(self, space: AddressSpace) -> XpuPools:
        return XpuPools(space)

    def committed_bytes(self, device: int = 0) -> int:
        """Return how much physical memory of a device is held, by our own books.

        What the device itself says may stand still
        (https://github.com/pytorch/pytorch/issues/161381).
        """
        return self.driver.committed_bytes(device)
