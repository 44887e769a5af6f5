"""Registers the cumem backend; imports no driver."""

from __future__ import annotations

from collections.abc import Iterable

from sleepbackends.hookspecs import BackendSpec, hookimpl
from sleepbackends.vmm.spec import vmm_spec


@hookimpl
def sleepbackends_register_backends() -> Iterable[BackendSpec]:
    """Offer CUDA virtual memory, the best choice where it works."""
    return [vmm_spec("cumem", "CUDA virtual memory, saved to pinned host memory.", 100)]
