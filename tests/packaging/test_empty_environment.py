"""The wheel alone, in an environment that has nothing else: no torch, no driver."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import sleepbackends
from tests.packaging.environments import (
    PYTHONS,
    ROOT,
    Distributions,
    Environment,
    interpreter,
    run,
)

OWN = "{}.{}".format(*sys.version_info)
INSTALLED_BYTES = 15_000_000
"""What the base install may take on the disk, dependencies and all."""

WHEELS = "wheels"
"""Where an environment keeps what was downloaded for it."""

SLEEP_AND_WAKE = """
from sleepbackends import Orchestrator

with Orchestrator.create() as orchestrator:
    with orchestrator.backend.region("weights") as region:
        weights = region.buffer(100_000)
    weights[:] = b"w" * 100_000
    print(orchestrator.sleep().released_bytes)
    orchestrator.wake_up()
    print(weights == b"w" * 100_000)
"""


@pytest.fixture(
    scope="module",
    params=[
        version if version == OWN else pytest.param(version, marks=pytest.mark.slow)
        for version in PYTHONS
    ],
)
def installed(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    distributions: Distributions,
) -> Environment:
    """An environment with the wheel, for each Python that this machine has."""
    python = interpreter(request.param)
    if python is None:
        pytest.skip(f"there is no Python {request.param} on this machine")
    environment = Environment(tmp_path_factory.mktemp("empty"), python)
    environment.run(
        "python", "-m", "pip", "download", "--quiet", "--dest", WHEELS, distributions.wheel
    )
    environment.install("--no-index", "--find-links", WHEELS, "sleepbackends")
    return environment


def test_it_has_neither_torch_nor_a_driver(installed: Environment) -> None:
    names = {name.lower() for name, _ in installed.listed()}
    assert "sleepbackends" in names
    unwanted = r"torch|numpy|cuda|nvidia|pytest|rich|typer|pygments"
    assert not {name for name in names if re.match(unwanted, name)}
    installed.run("python", "-m", "pip", "check")


def test_the_base_install_is_small(installed: Environment) -> None:
    assert installed.installed_bytes() < INSTALLED_BYTES


def test_importing_is_quick(installed: Environment) -> None:
    """Under 150 ms, as Python itself measures it, in the best of a few tries."""
    code = (
        "import time; began = time.perf_counter(); import sleepbackends; "
        "print(time.perf_counter() - began)"
    )
    assert min(float(installed.run("python", "-c", code)) for _ in range(5)) < 0.150


def test_every_public_name_can_be_had(installed: Environment) -> None:
    code = "import sleepbackends as s; print([getattr(s, name) for name in s.__all__] and 'all')"
    assert installed.run("python", "-c", code) == "all\n"


def test_an_engine_sleeps_and_wakes(installed: Environment) -> None:
    assert installed.run("python", "-c", SLEEP_AND_WAKE).split() == ["100000", "True"]


def test_the_command_lists_the_backends(installed: Environment) -> None:
    told = json.loads(installed.run("sleepbackends", "backends", "--json"))
    available = {each["name"]: each for each in told["backends"]}
    assert available["host"]["available"], available["host"]["reason"]
    assert {"host", "cumem"} <= available.keys()
    assert not available["cumem"]["available"]
    assert available["cumem"]["hint"], "says what to install"
    assert not told["failed"]


def test_the_command_shows_tables_without_rich(installed: Environment) -> None:
    assert "  summary " in installed.run("sleepbackends", "backends")
    assert "host memory" in installed.run("sleepbackends", "doctor")


def test_the_command_says_its_version(installed: Environment) -> None:
    said = installed.run("sleepbackends", "--version")
    assert said == f"sleepbackends {sleepbackends.__version__}\n"


@pytest.mark.parametrize("command", ["demo", "serve x:y"])
def test_what_needs_an_extra_says_which(installed: Environment, command: str) -> None:
    program = installed.bin / "sleepbackends"
    with pytest.raises(AssertionError, match=r"pip install 'sleepbackends\[\w+\]'"):
        run(program, *command.split())


def test_the_sbom_lists_what_is_installed(installed: Environment, tmp_path: Path) -> None:
    out = tmp_path / "sbom.cdx.json"
    tools = f"BIN={Path(sys.executable).parent}"
    run("make", "sbom", tools, f"OF={installed.bin.parent}", f"OUT={out}", cwd=ROOT)
    sbom = json.loads(out.read_text(encoding="utf-8"))
    assert sbom["bomFormat"] == "CycloneDX"
    root = sbom["metadata"]["component"]
    assert (root["name"], root["version"]) == ("sleepbackends", sleepbackends.__version__)
    (needed,) = [each for each in sbom["dependencies"] if each["ref"] == root["bom-ref"]]
    assert any("pydantic" in each for each in needed["dependsOn"])
    listed = {(each["name"], each["version"]) for each in sbom["components"]}
    assert installed.listed() - {(root["name"], root["version"])} <= listed


@pytest.mark.slow
def test_pipx_runs_it(distributions: Distributions, tmp_path: Path) -> None:
    Environment(tmp_path / "pipx").install("pipx")
    said = run(
        tmp_path / "pipx/bin/pipx", "run", "--no-cache", "--spec", distributions.wheel,
        *("sleepbackends", "--version"),
    )  # fmt: skip
    assert said.stdout == f"sleepbackends {sleepbackends.__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["torch", "cuda", "server", "ray", "rich", "testing", "dev"])
def test_every_extra_resolves(distributions: Distributions, tmp_path: Path, extra: str) -> None:
    environment = Environment(tmp_path / "resolving")
    environment.install("--upgrade", "pip")
    report = tmp_path / "report.json"
    environment.install("--dry-run", "--report", report, f"{distributions.wheel}[{extra}]")
    chosen = json.loads(report.read_text(encoding="utf-8"))["install"]
    assert "sleepbackends" in {each["metadata"]["name"] for each in chosen}
