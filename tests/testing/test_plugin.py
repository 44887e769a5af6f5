"""The pytest plugin, as whoever installs this package gets it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sleepbackends.testing
from sleepbackends.testing import FakeEngine, SimulatedBackend, SimulatedDevice

pytest_plugins = ["pytester"]


def test_the_fixtures_go_together(
    sleep_device: SimulatedDevice, sleep_backend: SimulatedBackend, sleep_engine: FakeEngine
) -> None:
    assert sleep_backend.device is sleep_device
    sleep_engine.recompile()
    assert sleep_engine.named() == ["recompile"]


def test_an_installed_backend_is_opened_and_closed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from sleepbackends.errors import ClosedError, InvalidOptionsError

        kept = []

        def test_it(open_sleep_backend):
            kept.append(open_sleep_backend("host", threads=1))
            assert not kept[0].suspend(1).changed
            with pytest.raises(InvalidOptionsError, match="threads"):
                open_sleep_backend("host", threads="many")

        def test_afterwards():
            with pytest.raises(ClosedError):
                kept[0].suspend(1)
        """
    )
    pytester.inline_run("-p", "no:cacheprovider").assertoutcome(passed=2)


def test_one_that_cannot_work_here_is_skipped_with_the_reason(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sleepbackends.availability import Availability
    from sleepbackends.host.backend import HostBackend

    monkeypatch.setattr(HostBackend, "probe", lambda: Availability(False, "no memory", "buy some"))
    pytester.makepyfile("def test_it(open_sleep_backend): open_sleep_backend('host')")
    result = pytester.inline_run("-p", "no:cacheprovider")
    _, (skipped,), _ = result.listoutcomes()
    assert "no memory (buy some)" in str(skipped.longrepr)


def test_loading_it_imports_neither_hypothesis_nor_pydantic() -> None:
    """It is loaded by every pytest where this package is installed."""
    script = (
        "import sys, sleepbackends.testing.pytest_plugin\n"
        "print([m for m in ('hypothesis', 'pydantic', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    for name in sleepbackends.testing.__all__:
        assert getattr(sleepbackends.testing, name) is not None
    assert dir(sleepbackends.testing) == sorted(sleepbackends.testing.__all__)
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        sleepbackends.testing.nothing_of_this_name  # noqa: B018 - the access is the test


def test_failed_asserts_of_the_suite_show_their_values(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from sleepbackends.testing import LifecycleTests, SimulatedBackend

        class Test(LifecycleTests):
            def make_backend(self, settings):
                backend = SimulatedBackend(None, settings)
                backend.api_version = 77
                return backend
        """
    )
    result = pytester.inline_run("-p", "no:cacheprovider", "-k", "identity")
    (failure,) = result.getfailures()
    assert "assert 77 <= " in str(failure.longrepr)
