from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from sleepbackends import API_VERSION, BackendSettings, BackendSpec, Registry
from sleepbackends.cli import app
from sleepbackends.demo import observe
from sleepbackends.examples.default_weights import create_weights
from sleepbackends.examples.model_config import ModelConfig
from sleepbackends.examples.tiny_engine import TinyEngine
from sleepbackends.examples.unselective import UnselectiveHostBackend
from sleepbackends.plugins import LoadedPlugins, RegisteredBackend, Source

SMALL = ModelConfig(
    vocab_size=4096,
    hidden_size=128,
    intermediate_size=256,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
)
# What the process allocates besides has to be small against what is given back.
ARGUMENTS = ("--tokens", "4", "--kv-mib", "96")
MAIN = [
    "load",
    "generate",
    "generate again",
    "sleep level 1",
    "wake up and generate",
    "release the KV cache",
    "wake up and generate",
    "sleep level 2",
    "wake up, reload and generate",
]
RELEASE_ALONE = ["load", "generate", "release the KV cache", "wake up and generate"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    create_weights(path, SMALL)
    return path


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, BackendSpec]:
    """Make the command see the built-in backends, and those that a test adds to this."""
    builtin = Registry.load({}, entry_points=[])
    specs: dict[str, BackendSpec] = {}

    def load() -> Registry:
        added = {n: RegisteredBackend(spec, Source("tp-dist")) for n, spec in specs.items()}
        return Registry(LoadedPlugins({**builtin.specs, **added}))

    monkeypatch.setattr(Registry, "load", load)
    return specs


def run(weights: Path, *arguments: str) -> Any:
    """Run the command in this process."""
    return CliRunner().invoke(app, ["demo", "--weights", str(weights), *ARGUMENTS, *arguments])


def told(result: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def wrong(steps: Collection[dict[str, Any]]) -> list[str]:
    return [step["name"] for step in steps if not step["intact"]]


def test_the_demo_as_a_user_runs_it(weights: Path, tmp_path: Path) -> None:
    command = "from sleepbackends.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", command, "demo", "--weights", weights, *ARGUMENTS, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SLEEPBACKENDS_DISABLE_PLUGINS": "*", "TMPDIR": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr
    document = told(result)
    assert document["ok"] is True
    assert document["backend"] == document["selection"]["name"]
    assert document["selection"]["reason"]
    model, steps = document["model"], document["steps"]
    assert model["weights_bytes"] == SMALL.weights_bytes
    assert [step["name"] for step in steps] == MAIN + RELEASE_ALONE + RELEASE_ALONE
    keys = {"name", "before_bytes", "after_bytes", "seconds", "degraded", "intact", "strategy"}
    assert all(keys <= step.keys() for step in steps)
    assert wrong(steps) == []

    asleep = steps[MAIN.index("sleep level 1")]
    given_back = asleep["before_bytes"] - asleep["after_bytes"]
    assert given_back >= 0.95 * (model["weights_bytes"] + model["kv_cache_bytes"])
    releases = [step for step in steps if step["strategy"]]
    assert [(step["planned"], step["strategy"], step["degraded"]) for step in releases] == [
        ("selective", "selective", False),
        ("suspend_and_reload", "suspend_and_reload", False),
        ("full_suspend", "full_suspend", True),
    ]


def test_text_tells_plan_and_outcome(weights: Path, installed: dict[str, BackendSpec]) -> None:
    result = run(weights)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[-1].startswith("ok: ")
    for strategy in ("selective", "suspend_and_reload", "full_suspend, degraded"):
        plan = next(i for i, line in enumerate(lines) if line.startswith(f"plan: {strategy}"))
        done = next(i for i, line in enumerate(lines) if line.startswith(f"done: {strategy}"))
        assert plan < done
        assert any("release the KV cache" in line for line in lines[plan:done])


# The demo notices what differs


def test_weights_that_differ_after_a_reload_are_noticed(
    weights: Path, installed: dict[str, BackendSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    reload = TinyEngine.reload

    def tampered(engine: TinyEngine, tags: Collection[str]) -> None:
        reload(engine, tags)
        engine.weights["model.norm.weight"][7] += 1e-6

    monkeypatch.setattr(TinyEngine, "reload", tampered)
    result = run(weights, "--json")
    assert result.exit_code == 1
    document = told(result)
    assert document["ok"] is False
    assert wrong(document["steps"]) == ["wake up, reload and generate"]
    assert "weights" in document["steps"][8]["differences"][0]

    result = run(weights)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "not ok"
    assert "the weights are not what was loaded" in result.stdout


def test_memory_that_is_not_given_back_is_noticed(
    weights: Path, installed: dict[str, BackendSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "process_memory", lambda: 1 << 30)
    result = run(weights, "--json")
    assert result.exit_code == 1
    steps = told(result)["steps"]
    release = "release the KV cache"
    assert wrong(steps) == ["sleep level 1", release, "sleep level 2", release, release]
    assert "memory fell by 0.0 MiB" in steps[3]["differences"][0]


def test_a_stale_prefix_cache_is_noticed(
    weights: Path, installed: dict[str, BackendSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TinyEngine, "drop_caches", lambda engine, tags: None)
    result = run(weights, "--json")
    assert result.exit_code == 1
    steps = told(result)["steps"]
    assert "wake up and generate" in wrong(steps)
    assert "generated" in steps[4]["differences"][0]


# Other backends


def test_a_backend_that_cannot_release_selectively_takes_every_step(
    weights: Path, installed: dict[str, BackendSpec]
) -> None:
    installed["host-unselective"] = BackendSpec(
        "host-unselective",
        "sleepbackends.examples.unselective:UnselectiveHostBackend",
        API_VERSION,
        "sleepbackends.host.options:HostOptions",
    )
    result = run(weights, "--json", "--backend", "host-unselective")
    assert result.exit_code == 0, result.output
    document = told(result)
    assert document["backend"] == "host-unselective"
    release = document["steps"][MAIN.index("release the KV cache")]
    assert (release["strategy"], release["degraded"]) == ("full_suspend", True)
    assert release["intact"]


class ThirdPartyOptions(BaseModel):
    selective_resume: bool


class ThirdPartyBackend(UnselectiveHostBackend):
    name = "zstd"

    def __init__(self, options: Any, settings: BackendSettings | None) -> None:
        super().__init__(None, settings, selective_resume=options.selective_resume)


def test_the_third_party_backend_shows_the_fallbacks_if_installed(
    weights: Path, installed: dict[str, BackendSpec]
) -> None:
    installed["zstd"] = BackendSpec(
        "zstd", f"{__name__}:ThirdPartyBackend", API_VERSION, f"{__name__}:ThirdPartyOptions"
    )
    result = run(weights, "--json")
    assert result.exit_code == 0, result.output
    by = [(step["backend"], step["strategy"]) for step in told(result)["steps"] if step["strategy"]]
    assert by == [
        ("host", "selective"),
        ("zstd", "suspend_and_reload"),
        ("zstd", "full_suspend"),
    ]


# What is refused


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_weights_file_is_refused(damage: str, weights: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    if damage == "truncated":
        path.write_bytes(weights.read_bytes()[:-1])
    result = run(path, "--json")
    assert result.exit_code == 2
    error = told(result)["error"]
    assert error["type"] == "WeightsFileError"
    assert str(path) in error["message"]
    assert error["hint"]


def test_an_unknown_backend_is_refused(weights: Path) -> None:
    result = run(weights, "--json", "--backend", "nothing")
    assert result.exit_code == 2
    assert told(result)["error"]["type"] == "UnknownBackendError"


def test_a_cache_that_is_too_small_is_refused(weights: Path) -> None:
    result = run(weights, "--json", "--kv-mib", "1", "--tokens", "5000")
    assert result.exit_code == 2
    assert told(result)["error"]["type"] == "RequestError"


@pytest.mark.parametrize("name", ["torch", "safetensors"])
def test_what_has_to_be_installed_is_named(
    name: str, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    result = run(weights, "--json")
    assert result.exit_code == 2
    error = told(result)["error"]
    assert name in error["message"]
    assert error["hint"] == "pip install 'sleepbackends[torch]'"


def test_the_policies_of_the_configuration_do_not_change_the_demo(
    weights: Path, installed: dict[str, BackendSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLEEPBACKENDS_POLICIES__KV_CACHE", "keep")
    monkeypatch.setenv("SLEEPBACKENDS_ON_UNSELECTIVE", "error")
    monkeypatch.setenv("SLEEPBACKENDS_FILL", "poison")
    assert run(weights, "--json").exit_code == 0
