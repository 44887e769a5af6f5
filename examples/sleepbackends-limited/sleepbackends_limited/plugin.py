"""Register the limited backend."""

from __future__ import annotations

from collections.abc import Iterable

from sleepbackends import BackendSpec, hookimpl


@hookimpl
def sleepbackends_register_backends() -> Iterable[BackendSpec]:
    """Offer the limited backend, by name only: it has no memory of its own."""
    return [
        BackendSpec(
            name="limited",
            target="sleepbackends_limited.backend:LimitedBackend",
            # The version this was written for, not whichever is installed.
            api_version=1,
            options_model="sleepbackends_limited.options:LimitedOptions",
            contract_tests="sleepbackends_limited.contract:LimitedTests",
            summary="any other backend, with limits and statistics",
        )
    ]
