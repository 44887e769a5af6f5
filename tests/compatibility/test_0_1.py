"""A backend that was written for 0.1 is found, used, proved, and in time warned of."""

from __future__ import annotations

import hashlib
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from sleepbackends import (
    IncompatibleBackendError,
    Orchestrator,
    ReleaseStrategy,
    protocol,
    registry,
)
from sleepbackends.deprecation import SleepBackendsDeprecationWarning
from sleepbackends.plugins import FailureKind
from sleepbackends.registry import Registry
from tests.compatibility import backend_0_1
from tests.compatibility.backend_0_1 import TapeBackend, TapeTests

FROZEN = "2ce7bfa9c298a6fab42ebc54fde3301d6a7c12053b6f5af53d24be86bd4f566e"


def load() -> Registry:
    point = EntryPoint("tape", backend_0_1.__name__, "sleepbackends")
    return Registry.load({}, [point], ())


class TestTape(TapeTests):
    random_settings = settings(TapeTests.random_settings, max_examples=50)


def test_the_backend_is_as_it_was_written() -> None:
    text = Path(backend_0_1.__file__).read_bytes()
    assert hashlib.sha256(text).hexdigest() == FROZEN


def test_it_is_found_and_its_class_keeps_to_the_contract() -> None:
    found = load()
    assert not found.failures
    assert found.load_class("tape") is TapeBackend
    assert found.probe("tape")
    assert found.contract_tests("tape") is None, "a field that came later has its default"


@pytest.mark.parametrize(
    ("selective", "strategy"),
    [(True, ReleaseStrategy.SELECTIVE), (False, ReleaseStrategy.FULL_SUSPEND)],
)
def test_an_engine_sleeps_on_it(selective: bool, strategy: ReleaseStrategy) -> None:
    config = {"backend": "tape", "options": {"selective": selective}}
    with Orchestrator.create(config, registry=load()) as orchestrator:
        backend: Any = orchestrator.backend
        with backend.region("weights") as region:
            weights = region.buffer(1000)
        with backend.region("kv_cache") as region:
            region.buffer(500)
        weights.write(b"w" * 1000)
        assert orchestrator.release_kv_cache().strategy is strategy
        orchestrator.wake_up()
        assert orchestrator.sleep().released_bytes == 1500
        orchestrator.wake_up()
        assert weights.read() == b"w" * 1000


def test_by_the_next_version_of_the_contract_it_works_and_warns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "API_VERSION", protocol.API_VERSION + 1)
    with pytest.warns(SleepBackendsDeprecationWarning, match="version 1 of the contract") as said:
        assert load().load_class("tape") is TapeBackend
    assert "'tape'" in str(said[0].message)
    assert "update" in str(said[0].message)


def test_once_its_version_is_too_old_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "API_VERSION", 3)
    monkeypatch.setattr(registry, "OLDEST_API_VERSION", 2)
    with pytest.raises(IncompatibleBackendError, match="written for version 1") as caught:
        load().load_class("tape")
    assert caught.value.hint.startswith("update")


def test_of_this_version_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load().load_class("tape")


def test_a_misspelt_hook_is_a_failure_of_its_own() -> None:
    """As it was in 0.1: hooks that are unknown are not passed over in silence."""
    point = EntryPoint("tape", "tests.compatibility", "sleepbackends")
    (failure,) = Registry.load({}, [point], ()).failures
    assert failure.kind is FailureKind.HOOK
