"""Options of the cumem backend."""

from __future__ import annotations

from sleepbackends.vmm.options import VmmOptions

__all__ = ["CumemOptions"]


class CumemOptions(VmmOptions):
    """Where saved bytes go, how allocations are laid out, and what is checked."""
