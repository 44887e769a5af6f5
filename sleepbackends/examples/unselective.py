"""Backends with their selective abilities turned off, to see what is done instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sleepbackends import BackendSettings
from sleepbackends.host.backend import HostBackend
from sleepbackends.host.options import HostOptions


class UnselectiveHostBackend(HostBackend):
    """A host backend that refuses to release some tags alone.

    Parameters
    ----------
    options : HostOptions, optional
        As of the host backend.
    settings : BackendSettings, optional
        What is common to all backends.
    selective_resume : bool
        Whether it can at least resume some tags alone.

    Raises
    ------
    StorageError
        As the host backend.
    """

    name = "host-unselective"

    def __init__(
        self,
        options: HostOptions | None = None,
        settings: BackendSettings | None = None,
        *,
        selective_resume: bool = False,
    ) -> None:
        super().__init__(options, settings)
        self.capabilities = replace(
            HostBackend.capabilities,
            supports_selective_release=False,
            supports_selective_resume=selective_resume,
        )


def without_selective_release(
    backend: Any, settings: BackendSettings, selective_resume: bool
) -> Any:
    """Make another backend of the same class that refuses to release some tags alone.

    Parameters
    ----------
    backend : BaseBackend
        The model.
    settings : BackendSettings
        What is common to all backends.
    selective_resume : bool
        Whether it can at least resume some tags alone.
    """
    other = type(backend)(backend.options, settings)
    other.name = f"{backend.name}-unselective"
    other.capabilities = replace(
        backend.capabilities,
        supports_selective_release=False,
        supports_selective_resume=selective_resume,
    )
    return other
