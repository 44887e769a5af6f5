"""Register the host backend."""

from __future__ import annotations

from collections.abc import Iterable

from sleepbackends.hookspecs import BackendSpec, hookimpl
from sleepbackends.protocol import API_VERSION


@hookimpl
def sleepbackends_register_backends() -> Iterable[BackendSpec]:
    """Offer the host backend: rank 0 in the automatic choice, because it works anywhere."""
    return [
        BackendSpec(
            name="host",
            target="sleepbackends.host.backend:HostBackend",
            api_version=API_VERSION,
            options_model="sleepbackends.host.options:HostOptions",
            summary="memory of this process, saved to a file; needs no accelerator",
            auto_priority=0,
            contract_tests="sleepbackends.verify.builtin:HostTests",
        )
    ]
