"""The releases of vLLM that the adapter was checked against, and what differs between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Release:
    """What one release of vLLM has, as far as this adapter has to know beforehand.

    Parameters
    ----------
    has_option : bool
        ``--sleep-mode-backend`` exists, so that each engine names its backend.
    restores_buffers_on_any_wake : bool
        What a sleep at level 2 saved of the weights is copied back by the next wake-up,
        whether or not the weights wake with it.
    """

    has_option: bool
    restores_buffers_on_any_wake: bool


SUPPORTED: Mapping[str, Release] = MappingProxyType(
    {
        "0.26.0": Release(has_option=False, restores_buffers_on_any_wake=True),
        "0.33.0": Release(has_option=True, restores_buffers_on_any_wake=False),
    }
)
"""Oldest first. The tests check each against the sources that it was released with."""


def find(version: str, *, forced: bool = False) -> Release | None:
    """Look a version of vLLM up.

    Parameters
    ----------
    version : str
        As vLLM tells it; a local part (``+cu130``) says how it was built and is ignored.
    forced : bool
        Take an unknown one for the newest that is known.

    Returns
    -------
    release : Release or None
        None if it is not known.
    """
    release = SUPPORTED.get(version.partition("+")[0])
    if release is None and forced:
        return list(SUPPORTED.values())[-1]
    return release
