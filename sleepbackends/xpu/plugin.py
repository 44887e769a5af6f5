"""Registers the xpu backend; imports no driver."""

from __future__ import annotations

from collections.abc import Iterable

from sleepbackends.hookspecs import BackendSpec, hookimpl
from sleepbackends.vmm.spec import vmm_spec


@hookimpl
def sleepbackends_register_backends() -> Iterable[BackendSpec]:
    """Offer virtual memory of Intel GPUs, chosen where there is no CUDA."""
    return [
        vmm_spec(
            "xpu", "Virtual memory of Intel GPUs, saved to host memory; never run on one by us.", 90
        )
    ]
