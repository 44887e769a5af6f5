from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sleepbackends.availability import Availability
from sleepbackends.bench import suspend_resume
from sleepbackends.bench.page import page
from sleepbackends.bench.request import Request, Spec
from sleepbackends.bench.rows import OURS
from sleepbackends.bench.suspend_resume import Result, Watch
from sleepbackends.bench.tables import markdown
from sleepbackends.cli import app
from sleepbackends.cli.bench_screen import BenchScreen
from sleepbackends.cli.command import INTERRUPTED
from sleepbackends.cumem.backend import CumemBackend

pytestmark = pytest.mark.usefixtures("either_way")

MACHINE = {"gpu": "Made-up 9000"}
SPEC = Spec(OURS, 16, 32, 20)
CUT = 13.0
"""Asked for as a time limit, the process is told to end once there are rows."""


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Replaces the measurement; what it was asked for is kept here."""
    asked: list[Request] = []

    def measure(request: Request, watch: Watch, keep: Callable[[Result], None]) -> Result:
        asked.append(request)
        watch.begin(SPEC, 1, 1)
        rows = [SPEC.row("resume", number, seconds) for number, seconds in enumerate((1, 3, 2))]
        for row in rows:
            watch.row(row)
        problem = "exit code 1: [bytes] differ" if "vllm" not in request.only else ""
        watch.end(SPEC, problem)
        result = {
            "machine": MACHINE,
            "link": {},
            "skipped": {SPEC.title: problem} if problem else {},
            "rows": [row.to_json() for row in rows],
        }
        keep(result)
        if request.timeout_s == CUT:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(suspend_resume, "measure", measure)
    return asked


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_what_is_asked_for_by_default(requests: list[Request]) -> None:
    assert run().exit_code == 0
    assert requests == [Request()]


def test_every_option(requests: list[Request], tmp_path: Path) -> None:
    arguments = ["--weights-gib", "4", "--weights-gib", "8", "--kv-gib", "2", "--rounds", "3"]
    arguments += ["--tensor-mib", "256", "--tensor-mib", "1", "--devices", "2"]
    arguments += ["--peers", str(tmp_path), "--only", "vllm", "--only", "tms"]
    arguments += ["--timeout-s", "7", "--vllm-version", "9.9"]
    assert run(*arguments).exit_code == 0
    assert requests == [Request((4, 8), 2, (256, 1), 3, 2, tmp_path, ("vllm", "tms"), 7, "9.9")]


def test_files_and_tables(requests: list[Request], tmp_path: Path) -> None:
    names = ("--out", "--markdown", "--html")
    out, tables, html = files = [tmp_path / "new" / name.strip("-") for name in names]
    pairs = zip(names, map(str, files), strict=True)
    result = run(*(argument for pair in pairs for argument in pair))
    assert result.exit_code == 0
    kept = json.loads(out.read_text())
    assert kept["machine"] == MACHINE
    assert [row["seconds"] for row in kept["rows"]] == [1, 3, 2]
    assert tables.read_text() == markdown(kept) == result.stdout
    assert html.read_text() == page(kept)
    assert "| resume | 2.000 |" in result.stdout
    assert result.stderr.splitlines() == [
        "1 of 1: sleepbackends, 16 GiB, tensors of 20 MiB",
        "  sleepbackends resume: 2.000 s, median of 3",
    ]


def test_exit_code_1_if_ours_failed(requests: list[Request], tmp_path: Path) -> None:
    result = run("--only", OURS, "--out", str(tmp_path / "result.json"))
    assert result.exit_code == 1
    assert "not to the end: exit code 1: [bytes] differ" in result.stderr
    assert "exit code 1: [bytes] differ" in result.stdout
    assert json.loads((tmp_path / "result.json").read_text())["skipped"]


def test_a_run_that_is_told_to_end_has_written_what_it_knows(
    requests: list[Request], tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    path = tmp_path / "result.json"
    result = run("--timeout-s", str(CUT), "--out", str(path))
    assert result.exit_code == INTERRUPTED
    assert len(json.loads(path.read_text())["rows"]) == 3
    assert signal.getsignal(signal.SIGTERM) == before


def test_without_a_gpu_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CumemBackend, "probe", lambda: Availability(False, "no GPU", "buy one"))
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: nothing can be measured here: no GPU (buy one)\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "1"], "--rounds must be 2 or more"),
        (["--devices", "3"], "3 devices cannot be compared"),
        (["--only", "x"], "x"),
        (["--peers", "/absent/folder"], "absent"),
        (["--out", "/proc/absent/file"], "/proc/absent/file cannot be written"),
        (["--html", "/"], "/ cannot be written: it is a folder"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(
    requests: list[Request], arguments: list[str], message: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not requests


def test_figures_of_what_is_being_measured_are_shown_as_they_come() -> None:
    with BenchScreen() as screen:
        screen.begin(SPEC, 2, 3)
        assert not screen.figures()
        for number, seconds in enumerate((1.0, 3.0, 2.5)):
            screen.row(SPEC.row("resume", number, seconds))
        screen.row(SPEC.row("resume", 0, 7.0, "0+1"))
        _, *rows = screen.figures()
        assert rows == [
            ["  sleepbackends resume", "2.500", "2.500", "3"],
            ["  sleepbackends resume, devices 0+1", "7.000", "7.000", "1"],
        ]
        screen.end(SPEC, "")
        assert not screen.figures()
