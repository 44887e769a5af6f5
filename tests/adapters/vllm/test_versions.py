from __future__ import annotations

import pytest

from sleepbackends.adapters.vllm.choice import (
    PLUGIN,
    Wish,
    choose,
    chosen_by_environment,
    configuration,
    is_ours,
    read_wish,
    vllm_name,
)
from sleepbackends.adapters.vllm.versions import SUPPORTED, Release, find
from sleepbackends.errors import ConfigurationError
from sleepbackends.policies import Policy

NEWEST = list(SUPPORTED.values())[-1]
OLD = Release(has_option=False, restores_buffers_on_any_wake=True)


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_build_of_a_release_is_that_release(version: str) -> None:
    assert find(version) is SUPPORTED[version]
    assert find(f"{version}+cu130") is SUPPORTED[version]


@pytest.mark.parametrize("version", ["0.26.1", "0.33.1.dev3+g1234", "0.34.0", "1.0", "", "dev"])
def test_another_one_is_not(version: str) -> None:
    assert find(version) is None
    assert find(version, forced=True) is NEWEST


@pytest.mark.parametrize(
    ("said", "wish"),
    [("", Wish.UNSAID), ("0", Wish.OFF), ("1", Wish.ON), (" Force", Wish.FORCE)],
)
def test_the_variable(said: str, wish: Wish) -> None:
    assert read_wish({"SLEEPBACKENDS_VLLM": said}) is wish
    assert read_wish({}) is Wish.UNSAID


def test_the_variable_misspelt() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'force'"):
        read_wish({"SLEEPBACKENDS_VLLM": "forced"})


@pytest.mark.parametrize(
    ("environ", "old", "new"),
    [
        ({}, False, False),
        ({"SLEEPBACKENDS_VLLM": "1"}, True, True),
        ({"SLEEPBACKENDS_VLLM": "force"}, True, True),
        ({"VLLM_PLUGINS": "a,sleepbackends"}, True, False),
        ({"VLLM_PLUGINS": "a,sleepbackends-b"}, False, False),
        ({"VLLM_PLUGINS": "sleepbackends", "SLEEPBACKENDS_VLLM": "0"}, False, False),
    ],
)
def test_the_environment_chooses(environ: dict[str, str], old: bool, new: bool) -> None:
    assert chosen_by_environment(environ, OLD) is old
    assert chosen_by_environment(environ, NEWEST) is new


@pytest.mark.parametrize(
    ("named", "by_environment", "chosen"),
    [
        ("cumem", False, None),
        ("cumem", True, PLUGIN),
        ("another", True, None),
        (PLUGIN, False, PLUGIN),
        ("sleepbackends-cumem", True, "sleepbackends-cumem"),
    ],
)
def test_an_engine_chooses(named: str, by_environment: bool, chosen: str | None) -> None:
    assert choose(named, by_environment) == chosen


def test_names() -> None:
    assert is_ours(PLUGIN)
    assert is_ours(vllm_name("cumem"))
    assert not is_ours("cumem")
    assert not is_ours("sleepbackendscumem")


def test_our_configuration_is_passed_on() -> None:
    environ = {
        "SLEEPBACKENDS_BACKEND": "host",
        "SLEEPBACKENDS_TIMEOUT_S": "9",
        "SLEEPBACKENDS_POLICIES__LORA": "keep",
        "SLEEPBACKENDS_VLLM": "1",
    }
    config = configuration(PLUGIN, environ)
    assert config.backend == "host"
    assert config.timeout_s == 9
    assert config.tag_policies.at("lora", 2) is Policy.KEEP
    assert config.tag_policies.at("workspace", 1) is Policy.DISCARD
    assert configuration("sleepbackends-cumem", environ).backend == "cumem"
    kept = configuration(PLUGIN, {"SLEEPBACKENDS_POLICIES__WORKSPACE": "offload"})
    assert kept.tag_policies.at("workspace", 2) is Policy.OFFLOAD
