"""The contract suite over any installed backend, for ``selfcheck``; run by pytest in a process."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from hypothesis import settings as hypothesis_settings

from sleepbackends.base import BaseBackend
from sleepbackends.registry import Registry
from sleepbackends.settings import BackendSettings
from sleepbackends.testing.suite import BackendContractTests

NAME_VARIABLE = "SLEEPBACKENDS_CHECKED_BACKEND"
SEQUENCES_VARIABLE = "SLEEPBACKENDS_CHECKED_SEQUENCES"


class TestCheckedBackend(BackendContractTests):
    """The backend that the environment names, with one block for each allocation."""

    random_settings = hypothesis_settings(
        BackendContractTests.random_settings,
        max_examples=int(os.environ.get(SEQUENCES_VARIABLE, "200")),
        database=None,
    )

    def make_backend(self, settings: BackendSettings) -> BaseBackend[Any]:
        """Create the backend, which was probed before."""
        backend_class, options_model = _loaded(os.environ[NAME_VARIABLE])
        backend: BaseBackend[Any] = backend_class(options_model(share_below_bytes=0), settings)
        return backend


@cache
def _loaded(name: str) -> tuple[Any, Any]:
    registry = Registry.load()
    return registry.load_class(name), registry.options_model(name)
