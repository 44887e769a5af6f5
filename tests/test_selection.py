from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from sleepbackends.availability import Availability
from sleepbackends.capabilities import Capabilities
from sleepbackends.config import SleepConfig
from sleepbackends.errors import BackendUnavailableError, NoUsableBackendError, UnknownBackendError
from sleepbackends.hookspecs import BackendSpec
from sleepbackends.mechanism import Fill
from sleepbackends.plugins import (
    FailureKind,
    LoadedPlugins,
    PluginFailure,
    RegisteredBackend,
    Source,
)
from sleepbackends.protocol import API_VERSION
from sleepbackends.registry import Registry
from sleepbackends.selection import open_backend, select

YES = Availability(True, "all there")
NO = Availability(False, "no device", "plug one in")
FAILURE = PluginFailure(Source("tp-broken"), "entry", "no libcuda", FailureKind.IMPORT)


class Offers:
    """Collects backends and the order in which they are probed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.plugins = LoadedPlugins()
        self.probed: list[str] = []

    def add(
        self,
        name: str,
        priority: int | None,
        answer: Availability = YES,
        version: int = API_VERSION,
        target: str = "",
    ) -> None:
        def probe(cls: type) -> Availability:
            self.probed.append(name)
            return answer

        def verb(self: object, *args: object, **kwargs: object) -> None: ...

        def construct(self: Any, options: object, settings: object) -> None:
            self.settings = settings

        verbs = dict.fromkeys(
            ("suspend", "resume", "discard", "state", "mark_valid", "close"), verb
        )
        members: dict[str, Any] = {
            "name": name,
            "api_version": API_VERSION,
            "capabilities": Capabilities(),
            "probe": classmethod(probe),
            "__init__": construct,
            **verbs,
        }
        backend = type(name, (), members)
        self.monkeypatch.setattr(sys.modules[__name__], f"offer_{name}", backend, raising=False)
        spec = BackendSpec(
            name, target or f"{__name__}:offer_{name}", version, auto_priority=priority
        )
        self.plugins.backends[name] = RegisteredBackend(spec, Source("tp"))

    @property
    def registry(self) -> Registry:
        return Registry(self.plugins)


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> Offers:
    return Offers(monkeypatch)


def test_named_backend_is_taken_unprobed_and_unranked(offers: Offers) -> None:
    offers.add("best", 9)
    offers.add("plain", None)
    selection = select(offers.registry, SleepConfig(backend="plain"))
    assert (selection.name, dict(selection.passed_over)) == ("plain", {})
    assert "named" in selection.reason
    assert offers.probed == []


def test_unknown_name_is_refused(offers: Offers) -> None:
    offers.add("best", 9)
    with pytest.raises(UnknownBackendError, match="known: best"):
        select(offers.registry, SleepConfig(backend="worst"))


def test_auto_takes_the_highest_available_and_explains_the_rest(offers: Offers) -> None:
    offers.add("lowest", 0)
    offers.add("chosen", 5)
    offers.add("absent", 8, answer=NO)
    offers.add("old", 9, version=0)
    offers.add("broken", 10, target="tp_absent:Backend")
    offers.add("unranked", None)
    selection = select(offers.registry, SleepConfig())
    assert selection.name == "chosen"
    assert "auto_priority 5" in selection.reason
    expected = {
        "lowest": "ranks below 'chosen'",
        "absent": "no device (plug one in)",
        "old": "version 0",
        "broken": "importing tp_absent:Backend",
        "unranked": "no auto_priority",
    }
    assert selection.passed_over.keys() == expected.keys()
    for name, reason in expected.items():
        assert reason in selection.passed_over[name]
    assert offers.probed == ["absent", "chosen"], "nothing below the choice is imported"


def test_equal_rank_is_decided_by_name(offers: Offers) -> None:
    offers.add("b", 1)
    offers.add("a", 1)
    assert select(offers.registry, SleepConfig()).name == "a"


def test_negative_priority_is_a_priority(offers: Offers) -> None:
    offers.add("last", -1)
    assert select(offers.registry, SleepConfig()).name == "last"


def test_none_usable_lists_every_attempt_and_the_failed_plugins(offers: Offers) -> None:
    offers.add("absent", 8, answer=NO)
    offers.add("unranked", None)
    offers.plugins.failures.append(FAILURE)
    with pytest.raises(NoUsableBackendError) as raised:
        select(offers.registry, SleepConfig())
    assert raised.value.attempts.keys() == {"absent", "unranked"}
    for part in ("no device", "plug one in", "unranked", "tp-broken"):
        assert part in str(raised.value)


def test_none_registered_says_so(offers: Offers) -> None:
    with pytest.raises(NoUsableBackendError, match="none is registered"):
        select(offers.registry, SleepConfig())


def test_open_backend_creates_what_was_selected(
    offers: Offers, caplog: pytest.LogCaptureFixture
) -> None:
    offers.add("chosen", 5)
    offers.plugins.failures.append(FAILURE)
    config = SleepConfig(fill=Fill.POISON, policies={"lora": "keep"})
    with caplog.at_level(logging.WARNING):
        opened = open_backend(config, offers.registry)
    backend: Any = opened.backend
    assert opened.selection.name == backend.name == "chosen"
    assert backend.settings == config.settings
    assert "no libcuda" in caplog.text


def test_open_backend_does_not_fall_back_from_a_named_one(offers: Offers) -> None:
    offers.add("named", 1, answer=NO)
    offers.add("other", 2)
    with pytest.raises(BackendUnavailableError, match="no device"):
        open_backend(SleepConfig(backend="named"), offers.registry)


def test_open_backend_loads_the_installed_plugins_by_default(
    offers: Offers, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers.add("chosen", 5)
    registry = offers.registry
    monkeypatch.setattr(Registry, "load", lambda: registry)
    assert open_backend(SleepConfig()).selection.name == "chosen"
