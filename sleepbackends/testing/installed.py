"""The contract suite for an installed backend: by name, through the registry, as users get it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from sleepbackends.registry import Registry
from sleepbackends.settings import BackendSettings
from sleepbackends.testing.suite import BackendContractTests


class InstalledBackendTests(BackendContractTests):
    """The suite for a backend that is named, so that its entry point is tested as well.

    Subclass it, name the backend, and let ``BackendSpec.contract_tests`` name the subclass:
    ``sleepbackends verify`` then runs it, and so can the tests of the package::

        class MyBackendTests(InstalledBackendTests):
            backend_name = "mybackend"
    """

    backend_name: ClassVar[str] = ""
    """The name it is registered under."""

    options: ClassVar[Mapping[str, Any]] = {}
    """Its options, with which what the suite assumes holds."""

    def make_backend(self, settings: BackendSettings) -> Any:
        """Create the backend as a configuration that names it does."""
        return _registry().create(self.backend_name, self.options, settings)


@cache  # backends are made hundreds of times, and what is installed stays
def _registry() -> Registry:
    return Registry.load()
