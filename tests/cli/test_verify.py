"""``sleepbackends verify``, as its user meets it: in a process, against installed backends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from sleepbackends.cli import app
from sleepbackends.cli.command import INTERRUPTED
from sleepbackends.testing import Promise
from tests.waiting import has_ended, until

HANGING = "hanging"
"""The file in which a backend that hangs says which process it is in."""

COMMAND = Path(sysconfig.get_path("scripts")) / "sleepbackends"

PLUGIN = """
from sleepbackends import BackendSpec, hookimpl

@hookimpl
def sleepbackends_register_backends():
    return [
        BackendSpec(name, f"acme_backends:{target}", 1, contract_tests=tests)
        for name, target, tests in [
            ("acme-honest", "Honest", "acme_backends:HonestTests"),
            ("acme-lying", "Lying", None),
            ("acme-crashing", "Crashing", None),
            ("acme-hanging", "Hanging", None),
            ("acme-absent", "Absent", None),
            ("acme-testless", "Honest2", "acme_backends:Missing"),
        ]
    ]
"""

BACKENDS = """
import os, pathlib, signal, sys, time
from sleepbackends import Availability
from sleepbackends.testing import SimulatedBackend
from sleepbackends.testing.installed import InstalledBackendTests

class Honest(SimulatedBackend):
    name = "acme-honest"
    def __init__(self, options, settings):
        print("noise on standard output")
        super().__init__(None, settings)

class Honest2(Honest):
    name = "acme-testless"

class HonestTests(InstalledBackendTests):
    has_steps = False

    def test_of_its_own(self, backend):
        assert backend.name == self.backend_name

class Lying(Honest):
    name = "acme-lying"
    def suspend(self, level=1, **kwargs):
        return super().suspend(min(level, 1), **kwargs)

class Crashing(Honest):
    name = "acme-crashing"
    def close(self):
        os.kill(os.getpid(), signal.SIGSEGV)

class Hanging(Honest):
    name = "acme-hanging"
    def close(self):
        pathlib.Path(os.environ["ACME_HANGING"]).write_text(str(os.getpid()))
        time.sleep(60)

class Absent(Honest):
    name = "acme-absent"
    @classmethod
    def probe(cls):
        return Availability(False, "no [device]", "plug one in")
"""


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install a distribution with a backend of each kind; return the folder."""
    folder = tmp_path_factory.mktemp("acme")
    (folder / "acme_plugin.py").write_text(PLUGIN)
    (folder / "acme_backends.py").write_text(BACKENDS)
    info = folder / "acme_sleep-2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-sleep\nVersion: 2.3\n")
    (info / "entry_points.txt").write_text("[sleepbackends]\nacme = acme_plugin\n")
    return folder


def environment(acme: Path) -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SLEEPBACKENDS_")}
    # What would change any other pytest has no say here.
    environ |= {"PYTHONPATH": str(acme), "COLUMNS": "150", "PYTEST_ADDOPTS": "--no-such-option"}
    return environ | {"ACME_HANGING": str(acme / HANGING)}


def run(acme: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "verify", *arguments],
        env=environment(acme),
        cwd=acme,
        capture_output=True,
        text=True,
        check=False,
    )


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_promises_that_are_kept(acme: Path, tmp_path: Path) -> None:
    files = [f"--{name}={tmp_path / name}" for name in ("junit", "html", "out")]
    done = run(acme, "acme-honest", "--sequences", "5", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "acme-honest  from acme-sleep 2.3, contract 1, suite 1" in done.stdout
    assert "acme-honest keeps its promises here" in done.stdout
    assert " has_steps is False" in done.stdout
    report = json.loads((tmp_path / "out").read_text())
    assert report["verdict"] == "kept"
    assert [each["name"] for each in report["results"] if each["part"] == "own"] == [
        "test_of_its_own"
    ]
    assert {each["outcome"] for each in report["results"]} == {"passed", "skipped"}
    promises = {key: each["outcome"] for key, each in report["promises"].items()}
    # No step can be made to fail or to wait, nothing can be staged, nobody tells what is used.
    not_tried = {key for key, outcome in promises.items() if outcome != "passed"}
    without_steps = {"copy-outlives-restore", "room", "never-waits", "faults-show"}
    assert not_tried == {*without_steps, "staging", "gives-back"}
    (suite,) = ElementTree.parse(tmp_path / "junit").getroot()  # noqa: S314 - written by us
    assert suite.get("tests") == str(len(report["results"]))
    assert "keeps its promises here" in (tmp_path / "html").read_text()
    assert "lifecycle\n" in done.stderr, "without a terminal the parts are told"
    assert sorted(each.name for each in acme.iterdir() if each.name.startswith(".")) == []


def test_a_lie_is_named(acme: Path) -> None:
    done = run(acme, "acme-lying", "--part", "lifecycle")
    assert done.returncode == 1
    assert f"broken promise [policies]: {Promise.POLICIES.value}" in done.stdout
    assert "the tag 'weights' is ['offloaded'], not 'discarded'" in done.stdout
    assert "policies: test_level_2_drops_weights" in done.stderr, "as soon as it has failed"


def test_a_backend_that_brings_the_process_down_is_a_failed_test(acme: Path) -> None:
    done = run(acme, "acme-crashing", "--json", "--part", "lifecycle")
    assert done.returncode == 1
    report = told(done)
    *_, failure = report["results"]
    assert failure["outcome"] == "failed"
    assert failure["message"] == "the process died of SIGSEGV"
    assert "Segmentation fault" in failure["details"]
    assert "tests were not run" in report["problem"]


def test_a_backend_that_hangs_is_a_failed_test(acme: Path) -> None:
    done = run(acme, "acme-hanging", "--json", "--part", "lifecycle", "--test-timeout-s", "3")
    assert done.returncode == 1
    *_, failure = told(done)["results"]
    assert failure["outcome"] == "failed"
    assert failure["message"] == "not done after 3 s"


@pytest.mark.parametrize(
    ("stop", "code"),
    [(signal.SIGTERM, INTERRUPTED), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_told_to_end_it_leaves_no_process(acme: Path, stop: signal.Signals, code: int) -> None:
    (acme / HANGING).unlink(missing_ok=True)
    process = subprocess.Popen(
        [COMMAND, "verify", "acme-hanging"],
        env=environment(acme),
        cwd=acme,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: (acme / HANGING).exists() and (acme / HANGING).read_text() != "")
        process.send_signal(stop)
        assert process.wait(30) == code
    finally:
        process.kill()
        process.wait()
    left = int((acme / HANGING).read_text())
    until(lambda: has_ended(left))


def test_a_backend_that_cannot_work_here_is_not_tried(acme: Path) -> None:
    done = run(acme, "acme-absent")
    assert done.returncode == 3
    assert "acme-absent cannot be verified here: no [device]" in done.stdout
    assert "plug one in" in done.stdout
    report = told(run(acme, "acme-absent", "--json"))
    assert (report["verdict"], report["results"]) == ("unavailable", [])
    assert report["available"] == {"ok": False, "reason": "no [device]", "hint": "plug one in"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nobody"], "unknown backend 'nobody'"),
        (["host", "--option", "threads=many"], "threads"),
        (["host", "--option", "threads"], "'threads' is not KEY=VALUE"),
        (["host", "--part", "everything"], "no part everything (its parts are lifecycle, "),
        (["host", "--html", "/proc/x/y.html"], "cannot be written"),
    ],
)
def test_what_cannot_be_tried_like_this(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["verify", *arguments])
    assert done.exit_code == 2
    assert said in done.stderr


def test_tests_of_a_backend_that_cannot_be_found(acme: Path) -> None:
    done = run(acme, "acme-testless")
    assert done.returncode == 2
    assert "acme_backends:Missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sleepbackends.verify.running", None)
    done = CliRunner().invoke(app, ["verify", "host"])
    assert done.exit_code == 2
    assert "pip install 'sleepbackends[testing]'" in done.stderr


def test_options_reach_the_backend(acme: Path) -> None:
    done = run(acme, "host", "--part", "graphs", "--option", "threads=1", "--json")
    assert done.returncode == 0, done.stderr
    assert told(done)["options"] == {"threads": 1}
