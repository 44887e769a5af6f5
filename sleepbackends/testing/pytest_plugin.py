"""The pytest plugin: fixtures over a simulated device, and the markers of the shipped tests.

It is loaded wherever pytest runs and this package is installed, so it imports nothing before a
fixture is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sleepbackends.protocol import SleepModeBackend
    from sleepbackends.testing import FakeEngine, SimulatedBackend, SimulatedDevice

# Failed asserts of the suite then show their values, as those of a test module do.
pytest.register_assert_rewrite("sleepbackends.testing.contract")


def pytest_configure(config: Any) -> None:
    """Register the marker ``gpu``."""
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU; skipped with the probe's reason")


@pytest.fixture
def sleep_device() -> SimulatedDevice:
    """Give a simulated device: a budget, stale bytes, calls that fail, are slow or hang."""
    from sleepbackends.testing import SimulatedDevice

    return SimulatedDevice()


@pytest.fixture
def sleep_backend(sleep_device: SimulatedDevice) -> Iterator[SimulatedBackend]:
    """Give a simulated backend on ``sleep_device``, closed afterwards."""
    from sleepbackends.testing import SimulatedBackend, SimulatedOptions

    backend = SimulatedBackend(SimulatedOptions(device=sleep_device))
    yield backend
    backend.close()


@pytest.fixture
def sleep_engine() -> FakeEngine:
    """Give an engine that only remembers which hooks were called."""
    from sleepbackends.testing import FakeEngine

    return FakeEngine()


@pytest.fixture
def open_sleep_backend() -> Iterator[Callable[..., SleepModeBackend]]:
    """Give a function that opens an installed backend by name, closed afterwards.

    It takes the name, and the backend's options as keywords. Where the backend cannot work, the
    test is skipped with the reason that its probe gives.
    """
    from sleepbackends.config import SleepConfig
    from sleepbackends.errors import BackendUnavailableError
    from sleepbackends.selection import open_backend

    opened: list[SleepModeBackend] = []

    def open_named(name: str, **options: Any) -> SleepModeBackend:
        try:
            opened.append(open_backend(SleepConfig(backend=name, options=options)).backend)
        except BackendUnavailableError as error:
            pytest.skip(str(error))
        return opened[-1]

    yield open_named
    for backend in opened:
        backend.close()
