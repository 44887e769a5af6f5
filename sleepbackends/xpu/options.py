"""Options of the xpu backend."""

from __future__ import annotations

from sleepbackends.vmm.options import VmmOptions

__all__ = ["XpuOptions"]


class XpuOptions(VmmOptions):
    """Where saved bytes go, how allocations are laid out, and what is checked.

    ``packing`` has no effect: there are no kernels for these devices.
    """
