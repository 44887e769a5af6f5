"""The installed example distribution, as a user meets it, alone and beside a broken one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from sleepbackends import Capabilities

COMMAND = Path(sysconfig.get_path("scripts")) / "sleepbackends"
SLEEP_AND_WAKE = """
from sleepbackends import Orchestrator

with Orchestrator.create({"backend": "zstd"}) as orchestrator:
    with orchestrator.backend.region("weights") as region:
        weights = region.buffer(100_000)
    weights[:] = b"w" * 100_000
    print(orchestrator.sleep().released_bytes)
    orchestrator.wake_up()
    print(weights == b"w" * 100_000)
"""


def run(*command: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that has to succeed, with a folder on the path or none."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLEEPBACKENDS_")}
    environ.pop("PYTHONPATH", None)
    if path is not None:
        environ["PYTHONPATH"] = str(path)
    done = subprocess.run(
        command,
        env={**environ, "COLUMNS": "200"},
        cwd=path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def listed(path: Path | None = None) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(run(COMMAND, "backends", "--json", path=path).stdout)
    return told


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Put a distribution beside the example that cannot be imported; return the folder."""
    (tmp_path / "acme_sleep.py").write_text("raise OSError('libacme.so: cannot open')\n")
    info = tmp_path / "acme_sleep-2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-sleep\nVersion: 2.3\n")
    (info / "entry_points.txt").write_text("[sleepbackends]\nacme = acme_sleep\n")
    return tmp_path


def test_installing_the_example_makes_it_appear() -> None:
    told = listed()
    (zstd,) = [backend for backend in told["backends"] if backend["name"] == "zstd"]
    assert zstd["source"] == {
        "distribution": "sleepbackends-zstd",
        "version": version("sleepbackends-zstd"),
    }
    assert zstd["available"], zstd["reason"]
    assert zstd["auto_priority"] is None, "a third party is asked for by name"
    assert zstd["capabilities"] == {
        name: name
        not in (
            "supports_selective_release",
            "supports_selective_resume",
            "supports_staging",
            "supports_durable_storage",
            "releases_device_context",
        )
        for name in Capabilities.names()
    }
    assert "sleepbackends-zstd" not in json.dumps(told["failed"])


def test_a_broken_distribution_is_named_and_changes_nothing_else(broken: Path) -> None:
    alone, beside = listed(), listed(broken)
    assert beside["backends"] == alone["backends"]
    (failure,) = [each for each in beside["failed"] if each not in alone["failed"]]
    assert failure["source"] == {"distribution": "acme-sleep", "version": "2.3"}
    assert failure["entry_point"] == "acme"
    assert "libacme.so" in failure["error"]
    text = run(COMMAND, "backends", path=broken).stdout
    assert "failed: acme of acme-sleep 2.3: OSError: libacme.so: cannot open" in text
    assert "sleepbackends-zstd" in text


def test_the_example_sleeps_and_wakes_beside_a_broken_distribution(broken: Path) -> None:
    done = run(sys.executable, "-c", SLEEP_AND_WAKE, path=broken)
    assert done.stdout.split() == ["100000", "True"]
    assert "acme-sleep 2.3" in done.stderr, "whoever opens a backend is told"
