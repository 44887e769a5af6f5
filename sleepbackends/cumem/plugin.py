"""Registers the cumem backend; imports no driver."""

from __future__ import annotations

from collections.abc import Iterable

from sleepbackends.hookspecs import BackendSpec, hookimpl
from sleepbackends.protocol import API_VERSION


@hookimpl
def sleepbackends_register_backends() -> Iterable[BackendSpec]:
    """Offer CUDA virtual memory, the best choice where it works."""
    return [
        BackendSpec(
            name="cumem",
            target="sleepbackends.cumem.backend:CumemBackend",
            api_version=API_VERSION,
            options_model="sleepbackends.cumem.options:CumemOptions",
            summary="CUDA virtual memory, saved to pinned host memory.",
            auto_priority=100,
            contract_tests="sleepbackends.verify.builtin:CumemTests",
        )
    ]
