"""Registers the checkpoint backend; imports no driver."""

from __future__ import annotations

from collections.abc import Iterable

from sleepbackends.hookspecs import BackendSpec, hookimpl
from sleepbackends.protocol import API_VERSION


@hookimpl
def sleepbackends_register_backends() -> Iterable[BackendSpec]:
    """Offer CUDA process checkpoints, which nobody gets without asking for them."""
    return [
        BackendSpec(
            name="checkpoint",
            target="sleepbackends.checkpoint.backend:CheckpointBackend",
            api_version=API_VERSION,
            options_model="sleepbackends.checkpoint.options:CheckpointOptions",
            summary="CUDA process checkpoint: the whole GPU, context included; experimental.",
        )
    ]
