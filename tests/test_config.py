from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sleepbackends.config import SleepConfig, load_config
from sleepbackends.errors import ConfigurationError
from sleepbackends.mechanism import Fill
from sleepbackends.policies import Policies, Policy, TagPolicy

KEEP = TagPolicy(Policy.KEEP, Policy.KEEP)


def env(**variables: str) -> dict[str, str]:
    return {f"SLEEPBACKENDS_{name}": value for name, value in variables.items()}


def test_defaults() -> None:
    config = load_config(environ={})
    assert config == SleepConfig()
    assert (config.backend, dict(config.options), config.timeout_s) == ("auto", {}, 300.0)
    assert (config.on_unselective, config.quiesce_mode) == ("fallback", "wait")
    assert config.settings.policies == Policies()
    assert config.settings.wait_for_memory_s == 0.0
    assert config.settings.fill is Fill.ZERO


def test_config_is_immutable_and_survives_pickling() -> None:
    config = SleepConfig(policies={"lora": "keep"}, options={"a": [1]}, timeout_s=None)
    with pytest.raises(ValidationError, match="frozen"):
        config.backend = "other"
    assert pickle.loads(pickle.dumps(config)) == config


def test_config_survives_json() -> None:
    config = SleepConfig(policies={"lora": "keep"}, fill=Fill.POISON, wait_for_memory_s=2)
    assert SleepConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("policy", list(Policy))
def test_one_word_is_the_policy_of_both_levels(policy: Policy) -> None:
    config = SleepConfig(policies={"weights": policy.value})
    assert config.tag_policies.of("weights") == TagPolicy(policy, policy)
    assert config.tag_policies.of("kv_cache") == Policies().of("kv_cache")


def test_levels_can_differ() -> None:
    config = SleepConfig(policies={"lora": {"level_1": "keep", "level_2": "discard"}})
    assert config.settings.policies.of("lora") == TagPolicy(Policy.KEEP, Policy.DISCARD)


def test_infinite_timeout_is_none_because_toml_has_no_null() -> None:
    assert SleepConfig(timeout_s=math.inf).timeout_s is None


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"bakend": "x"}, ["bakend", "did you mean 'backend'", "on_unselective"]),
    ({"backend": ""}, ["backend"]),
    ({"backend": 3}, ["backend", "given: 3"]),
    ({"options": 3}, ["options", "given: 3"]),
    ({"options": {1: 2}}, ["options.1", "string"]),
    ({"policies": {"lora": "ofload"}}, ["policies.lora", "did you mean 'offload'", "discard"]),
    ({"policies": {"lora": 3}}, ["policies.lora", "given: 3"]),
    ({"policies": {"lora": {"level_1": "keep"}}}, ["policies.lora.level_2", "missing"]),
    (
        {"policies": {"lora": {"level_1": "kep", "level_2": "keep"}}},
        ["policies.lora.level_1", "'keep', 'offload' or 'discard'", "given: 'kep'"],
    ),
    ({"policies": {"lora": {"level_3": "keep"}}}, ["policies.lora", "level_3", "level_1"]),
    (
        {"policies": {"lora": {"level_1": "discard", "level_2": "keep"}}},
        ["policies.lora", "level 2 (keep) would give up less"],
    ),
    ({"on_unselective": "never"}, ["on_unselective", "'reload_only'", "given: 'never'"]),
    ({"quiesce_mode": "drain"}, ["quiesce_mode", "'abort'"]),
    ({"timeout_s": 0}, ["timeout_s", "greater than 0", "given: 0"]),
    ({"timeout_s": math.nan}, ["timeout_s"]),
    ({"timeout_s": True}, ["timeout_s", "a number is needed"]),
    ({"wait_for_memory_s": -1}, ["wait_for_memory_s", "given: -1"]),
    ({"wait_for_memory_s": math.inf}, ["wait_for_memory_s", "finite"]),
    ({"fill": "zeo"}, ["fill", "'poison'"]),
    ({"fill": "zeo", "timeout_s": 0}, ["fill:", "timeout_s:"]),
]


@pytest.mark.parametrize(("values", "parts"), WRONG, ids=[str(values) for values, _ in WRONG])
def test_wrong_values_are_named_with_what_is_known(
    values: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as constructed:
        SleepConfig(**values)
    with pytest.raises(ConfigurationError) as loaded:
        load_config(values, environ={})
    for part in parts:
        assert part in str(constructed.value)
        assert part in str(loaded.value)


def test_a_complete_config_is_returned_as_it_is() -> None:
    config = SleepConfig()
    assert load_config(config, environ=env(BACKEND="host", NONSENSE="1")) is config


def test_precedence_is_python_environment_file_defaults(tmp_path: Path) -> None:
    path = tmp_path / "sleep.toml"
    path.write_text('backend = "file"\ntimeout_s = 1\nfill = "none"\nquiesce_mode = "keep"\n')
    environ = env(CONFIG=str(path), BACKEND="variable", TIMEOUT_S="2", FILL="poison")
    config = load_config({"backend": "python", "timeout_s": 3}, environ=environ)
    assert (config.backend, config.timeout_s) == ("python", 3)
    assert config.fill is Fill.POISON
    assert config.quiesce_mode == "keep"
    assert config.on_unselective == "fallback"
    assert load_config(path, environ=env(BACKEND="variable")).backend == "variable"


def test_mappings_are_merged_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "sleep.json"
    content = {"options": {"a": 1, "b": 1, "c": 1}, "policies": {"lora": "keep"}}
    path.write_text(json.dumps(content))
    environ = env(OPTIONS__B="2", OPTIONS__C="2", CONFIG=str(path), POLICIES__WEIGHTS="keep")
    config = load_config({"options": {"c": 3}}, environ=environ)
    assert config.options == {"a": 1, "b": "2", "c": 3}
    assert config.policies == {"lora": KEEP, "weights": KEEP}


def test_a_named_file_replaces_the_one_of_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "sleep.toml"
    path.write_text('backend = "mine"\n')
    config = load_config(str(path), environ=env(CONFIG=str(tmp_path / "absent.toml")))
    assert config.backend == "mine"


def test_environment_reaches_nested_fields() -> None:
    environ = env(
        OPTIONS__SPOOL_DIRECTORY="/spool",
        OPTIONS__SIZE="12",
        POLICIES__LORA="keep",
        POLICIES__WEIGHTS__LEVEL_1="keep",
        POLICIES__WEIGHTS__LEVEL_2="discard",
        TIMEOUT_S="inf",
    )
    config = load_config(environ=environ)
    assert config.options == {"spool_directory": "/spool", "size": "12"}
    assert config.policies == {"lora": KEEP, "weights": TagPolicy(Policy.KEEP, Policy.DISCARD)}
    assert config.timeout_s is None


def test_environment_takes_whole_mappings_as_json() -> None:
    environ = env(OPTIONS='{"Sizes": [1, 2]}', OPTIONS__OTHER="x")
    assert load_config(environ=environ).options == {"Sizes": [1, 2], "other": "x"}


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLEEPBACKENDS_BACKEND", "from-process")
    assert load_config().backend == "from-process"
    assert load_config(environ={}).backend == "auto"
    assert SleepConfig().backend == "auto"


def test_empty_reserved_and_foreign_variables_are_left_alone() -> None:
    environ = env(BACKEND="", CONFIG="", DISABLE_PLUGINS="x", TEST_DEVICE="y")
    environ["SLEEPBACKEND"] = "z"
    assert load_config(environ=environ) == SleepConfig()


@pytest.mark.parametrize(
    ("variable", "part"),
    [
        ("BACKND", "did you mean SLEEPBACKENDS_BACKEND?"),
        ("DISABLE_PLUGIN", "did you mean SLEEPBACKENDS_DISABLE_PLUGINS?"),
        ("XYZ", "known: SLEEPBACKENDS_ and one of BACKEND"),
        ("BACKEND__NAME", "SLEEPBACKENDS_BACKEND__NAME"),
        ("OPTIONS__", "SLEEPBACKENDS_OPTIONS__"),
    ],
)
def test_variables_that_would_set_nothing_are_refused(variable: str, part: str) -> None:
    with pytest.raises(ConfigurationError, match="unknown environment variable") as raised:
        load_config(environ=env(**{variable: "x"}))
    assert part in str(raised.value)


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({"OPTIONS": "{"}, "options"),
        ({"OPTIONS": "[1]"}, "options"),
        ({"TIMEOUT_S": "soon"}, "given: 'soon'"),
        ({"POLICIES__LORA": "kep"}, "policies.lora"),
    ],
)
def test_garbled_variables_are_named(variables: dict[str, str], part: str) -> None:
    with pytest.raises(ConfigurationError, match="environment") as raised:
        load_config(environ=env(**variables))
    assert part in str(raised.value)


FILES = [
    ("sleep.toml", b"backend = ", "garbled"),
    ("sleep.json", b'{"backend": ', "garbled"),
    ("sleep.json", b"\xff", "garbled"),
    ("sleep.json", b"[1]", r"holds \[1\]"),
    ("sleep.yaml", b"backend: x", r"\.json, \.toml"),
    ("sleep", b"", "unknown suffix"),
    ("sleep.toml", b"bakend = 1", "did you mean 'backend'"),
]


@pytest.mark.parametrize(("name", "content", "said"), FILES)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=said) as raised:
        load_config(path, environ={})
    assert str(path) in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "absent.toml"
    with pytest.raises(ConfigurationError, match="No such file") as raised:
        load_config(environ=env(CONFIG=str(path)))
    assert str(path) in str(raised.value)
