"""The hooks that a plugin may implement.

A plugin is a module named by an entry point in the group ``sleepbackends``. It must be
cheap to import: no torch and no driver.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pluggy

PROJECT_NAME = "sleepbackends"
"""The entry-point group, and the name of the pluggy project."""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
"""Marks a function of a plugin that implements a hook."""


@dataclass(frozen=True)
class BackendSpec:
    """Where to find a backend, without importing it.

    Parameters
    ----------
    name : str
        The name users select it by.
    target : str
        ``"package.module:Class"`` of the backend; imported when the backend is probed or
        chosen, not before.
    api_version : int
        The version of the contract (``sleepbackends.API_VERSION``) it was written for.
    options_model : str, optional
        ``"package.module:Class"`` of the pydantic model of its options; None for a backend
        without options.
    summary : str
        One line for listings.
    auto_priority : int, optional
        Its rank when the configuration says ``backend = "auto"``; the highest available one
        wins. None keeps the backend out of that choice: it has to be asked for by name.
    contract_tests : str, optional
        ``"package.module:Class"`` of the contract suite for this backend, for
        ``sleepbackends verify``; None takes the suite as it is.
    """

    name: str
    target: str
    api_version: int
    options_model: str | None = None
    summary: str = ""
    auto_priority: int | None = None
    contract_tests: str | None = None


@hookspec
def sleepbackends_register_backends() -> Iterable[BackendSpec]:  # type: ignore[empty-body]
    """Return the backends this plugin offers.

    Called once for each plugin when a registry is loaded. An exception, or anything other
    than ``BackendSpec`` objects, is recorded as a failure of this plugin and shown by
    ``sleepbackends backends``; other plugins are not affected.
    """
