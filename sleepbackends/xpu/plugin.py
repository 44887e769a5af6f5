"""Registers the xpu backend; imports no driver."""

from __future__ import annotations

from collections.abc import Iterable

from sleepbackends.hookspecs import BackendSpec, hookimpl
from sleepbackends.vmm.spec import vmm_spec


@hookimpl
def sleepbackends_register_backends() -> Iterable[BackendSpec]:
    """Offer virtual memory of Intel GPUs, chosen where there is no CUDA."""
    summary = (
        "Virtual memory of Intel GPUs; exercised through Intel's real loader against a simulated "
        "driver, never on an Intel GPU by us."
    )
    return [vmm_spec("xpu", summary, 90)]
