"""Register the memfd backend."""

from __future__ import annotations

from collections.abc import Iterable

from sleepbackends import BackendSpec, hookimpl


@hookimpl
def sleepbackends_register_backends() -> Iterable[BackendSpec]:
    """Offer the memfd backend, by name only: asleep, it gives nothing back to the machine."""
    return [
        BackendSpec(
            name="memfd",
            target="sleepbackends_memfd.backend:MemfdBackend",
            # The version this was written for, not whichever is installed.
            api_version=1,
            options_model="sleepbackends_memfd.options:MemfdOptions",
            contract_tests="sleepbackends_memfd.contract:MemfdTests",
            summary="memory of this process, in sealed files that another one can be given",
        )
    ]
