"""What the suite assumes can be denied, and whoever skips a test says why."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest

from sleepbackends.settings import BackendSettings
from sleepbackends.testing import (
    BackendContractTests,
    BrokenPromise,
    FaultTests,
    GraphTests,
    InstalledBackendTests,
    LifecycleTests,
    OffloadTests,
    Promise,
    RandomSequenceTests,
    RankTests,
    SelectiveTests,
    SimulatedBackend,
    StagingTests,
    ThreadTests,
)
from sleepbackends.testing.contract.fixtures import ASSUMPTIONS, ContractFixtures
from sleepbackends.testing.promises import SUITE_VERSION, proves
from sleepbackends.testing.suite import MIXINS

pytest_plugins = ["pytester"]

SUITE = """
    from sleepbackends.capabilities import Capabilities
    from sleepbackends.testing import BackendContractTests, SimulatedBackend, SimulatedOptions
    from sleepbackends.testing.simulated import ALL
    from hypothesis import settings

    class Test(BackendContractTests):
        random_settings = settings(BackendContractTests.random_settings, max_examples=5)
        {body}

        def make_backend(self, settings):
            return {backend}
"""


def run(
    pytester: pytest.Pytester, body: str, backend: str = "SimulatedBackend(None, settings)"
) -> tuple[int, int, list[str]]:
    path = pytester.makepyfile(test_it=SUITE.format(body=body, backend=backend))
    result = pytester.inline_run("-p", "no:cacheprovider", str(path))
    passed, skipped, failed = result.listoutcomes()
    assert not failed, failed[0].longrepr
    return (
        len(passed),
        len(skipped),
        [cast("tuple[str, int, str]", each.longrepr)[2] for each in skipped],
    )


def test_an_assumption_that_is_denied_is_named(pytester: pytest.Pytester) -> None:
    """In one run, because all of them together leave enough."""
    passed, _, reasons = run(pytester, "; ".join(f"{name} = False" for name in ASSUMPTIONS))
    assert passed >= 25
    said = " ".join(reasons)
    for name in ASSUMPTIONS:
        assert re.search(rf"\b{name}\b[\w, ]* is False", said), f"nothing was skipped for {name}"


def test_a_backend_that_can_do_nothing_is_left_with_what_holds_for_all(
    pytester: pytest.Pytester,
) -> None:
    body = "def allocate(self, *a): return super().allocate(*a)"
    backend = "SimulatedBackend(SimulatedOptions(Capabilities(owns_allocations=True)), settings)"
    passed, _, reasons = run(pytester, body, backend)
    assert passed >= 25
    for flag in ("supports_offload", "supports_selective_release", "preserves_addresses"):
        assert any(f"{flag} is False" in reason for reason in reasons)


def test_without_regions_the_suite_needs_allocate() -> None:
    suite = BackendContractTests()
    backend: Any = SimulatedBackend()
    backend.capabilities = type(backend.capabilities)()
    with pytest.raises(pytest.skip.Exception, match="owns_allocations is False"):
        suite.allocate(backend, "weights", 5)


def test_steps_that_are_not_there_are_not_assumed() -> None:
    with pytest.raises(BrokenPromise, match="has_steps is True, and object neither"):
        ContractFixtures().need_steps(object())


class Later(BackendContractTests):
    suite_version = SUITE_VERSION

    @proves(Promise.FLAGS, since=SUITE_VERSION + 1)
    def test_something_new(self) -> None:
        raise AssertionError("new")


def test_a_test_of_a_later_version_is_skipped_and_says_so() -> None:
    said = f"suite_version is {SUITE_VERSION}; this test came with {SUITE_VERSION + 1}"
    with pytest.raises(pytest.skip.Exception, match=said):
        Later().test_something_new()


def test_and_runs_for_whoever_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Later, "suite_version", SUITE_VERSION + 1)
    with pytest.raises(BrokenPromise, match=r"broken promise \[flags\].*\n.*seen: new"):
        Later().test_something_new()


def test_the_parts_are_public_and_make_up_the_whole() -> None:
    parts = [
        LifecycleTests,
        OffloadTests,
        SelectiveTests,
        StagingTests,
        FaultTests,
        ThreadTests,
        GraphTests,
        RankTests,
        RandomSequenceTests,
    ]
    assert list(MIXINS.values()) == parts
    assert list(BackendContractTests.__bases__) == parts
    assert issubclass(InstalledBackendTests, BackendContractTests)


def test_no_test_is_newer_than_the_suite() -> None:
    versions = {
        test.since
        for part in MIXINS.values()
        for name, test in vars(part).items()
        if name.startswith("test_")
    }
    assert max(versions) <= SUITE_VERSION


def test_an_author_writes_at_most_three_methods() -> None:
    written = {"make_backend", "allocate", "used_bytes"}
    assert written <= vars(ContractFixtures).keys()
    with pytest.raises(NotImplementedError, match="make_backend"):
        ContractFixtures().make_backend(BackendSettings())
