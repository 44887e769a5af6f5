"""Register the zstd backend."""

from __future__ import annotations

from collections.abc import Iterable

from sleepbackends import BackendSpec, hookimpl


@hookimpl
def sleepbackends_register_backends() -> Iterable[BackendSpec]:
    """Offer the zstd backend, by name only: it is slower than the host backend."""
    return [
        BackendSpec(
            name="zstd",
            target="sleepbackends_zstd.backend:ZstdBackend",
            # The version this was written for, not whichever is installed.
            api_version=1,
            options_model="sleepbackends_zstd.options:ZstdOptions",
            summary="memory of this process, kept compressed in memory while it sleeps",
        )
    ]
