"""The test class that is run for a request."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

from sleepbackends.errors import RequestError
from sleepbackends.registry import Registry
from sleepbackends.testing.installed import InstalledBackendTests
from sleepbackends.verify.request import VerifyRequest


def tests_of(request: VerifyRequest) -> type[Any]:
    """Make the class: what the backend brings, or the suite as it is.

    Raises
    ------
    RequestError
        If the backend's own class does not take options and some were given.
    UnknownBackendError, PluginError
        If the backend, or the class it names, cannot be found.
    """
    own = Registry.load().contract_tests(request.backend)
    base = own or InstalledBackendTests
    body: dict[str, Any] = {"backend_name": request.backend}
    if issubclass(base, InstalledBackendTests):
        body["options"] = {**base.options, **request.options}
    elif request.options:
        raise RequestError(
            f"the tests of {request.backend!r} make the backend by themselves and take no options",
            hint="leave options out, or let its class derive from InstalledBackendTests",
        )
    if request.sequences is not None:
        body["random_settings"] = settings(base.random_settings, max_examples=request.sequences)
    return type("TestBackend", (base,), body)
