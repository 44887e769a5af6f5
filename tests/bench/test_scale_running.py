"""Runs of the benchmark of many GPUs that are cut, fail, or find too little memory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks import scale
from benchmarks.scaling import layouts
from benchmarks.scaling.cases import Measurement
from benchmarks.scaling.spec import ROOT, Row, Spec
from sleepbackends import RankLostError
from tests.native.fixtures import kernel_images, native_library, simulator
from tests.ranks.test_torch_distributed import needs_gloo
from tests.simulators.cuda import Simulator, build, environment

__all__ = ["kernel_images", "native_library", "simulator"]

# The processes


def test_processes_that_do_not_end_are_waited_for_together() -> None:
    sleeping = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(3)
    ]
    started = time.monotonic()
    layouts._end(sleeping, 2.0)
    assert time.monotonic() - started < 4
    assert {process.returncode for process in sleeping} == {-signal.SIGKILL}


class Group:
    """Two ranks, of which one dies while both begin to sleep, as is heard later."""

    lost_ranks: tuple[int, ...] = ()
    asleep_bytes = 0

    def suspend(self) -> None:
        self.lost_ranks = (1,)
        raise RankLostError("rank 1 has gone")

    def forget_lost(self) -> None:
        self.lost_ranks = ()

    def refresh(self) -> None:
        assert not self.lost_ranks
        self.asleep_bytes = 7

    def state(self) -> Any:
        state = SimpleNamespace(asleep_bytes=self.asleep_bytes, mapped_bytes=7 - self.asleep_bytes)
        return SimpleNamespace(ranks={0: state})


def test_where_the_others_are_is_asked_once_a_rank_was_killed() -> None:
    group = Group()
    ranks = layouts.Ranks(group, 2, lambda *_: [], in_processes=True)
    found: list[Row] = []
    spec = Spec("processes", "host", 2)
    measurement = Measurement(ranks, spec, found.append, lambda facts: None)
    measurement._fails("suspend: killed", 0, group.suspend)
    assert [row.outcome for row in found] == ["all asleep"]


@needs_gloo
def test_ranks_that_outlive_a_killed_one_are_not_waited_for() -> None:
    spec = Spec("processes", "host", 3, 0.002, 0.001, 0.5, rounds=1)
    found: list[Mapping[str, Any]] = []
    started = time.monotonic()
    assert scale.run(spec, 120, found.append) == ""
    assert time.monotonic() - started < layouts.END_S
    assert [each["row"]["outcome"] for each in found if "row" in each][-1] == "all awake"


def test_a_rank_that_does_not_come_ends_the_one_that_waits_for_it() -> None:
    code = (
        "import subprocess, sys, time; from benchmarks.scaling.layouts import _all_there\n"
        "with _all_there([subprocess.Popen([sys.executable, '-c', 'exit(3)'])]): time.sleep(60)"
    )
    waiting = [sys.executable, "-c", code]
    done = subprocess.run(waiting, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (1, "rank 1 ended with exit code 3 at the start\n")


@pytest.mark.parametrize("started_here", [True, False])
def test_what_a_run_started_ends_with_it(started_here: bool) -> None:
    """Also if it has ended itself, or was left alone."""
    code = (
        "import subprocess, sys, time; from benchmarks.scale import _end_with; _end_with(0)\n"
        "print(subprocess.Popen(['sleep', '60'], stdin=subprocess.DEVNULL).pid, flush=True)\n"
        f"time.sleep({0 if started_here else 60})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    sleeping = psutil.Process(int(process.stdout.readline()))
    if started_here:
        process.wait(10)
        assert sleeping.is_running()
        scale._end(process)
    else:
        process.stdin.close()  # as if whoever has the other end had been killed
        assert process.wait(10) == -signal.SIGKILL
        process.stdout.close()
    sleeping.wait(10)


def arguments(folder: Path, *more: str) -> list[str]:
    return [
        "--backend",
        "host",
        "--ranks",
        "1",
        "2",
        "--layout",
        "threads",
        "--coordination",
        "--out",
        str(folder),
        *more,
    ]


def test_a_run_that_is_cut_has_written_what_it_knew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(spec: Spec, timeout_s: float, take: Callable[[dict[str, Any]], None]) -> str:
        take({"row": Row("threads", "host", 1, "dirty", 0, 1.0).to_json()})
        raise KeyboardInterrupt

    monkeypatch.setattr(scale, "run", cut)
    with pytest.raises(KeyboardInterrupt):
        scale.main(arguments(tmp_path))
    (found,) = json.loads((tmp_path / "scale.json").read_text())["rows"]
    assert found["case"] == "dirty"
    assert [path.name for path in tmp_path.iterdir()] == ["scale.json"]


def test_a_run_stops_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def slow(spec: Spec, timeout_s: float, take: object) -> str:
        limits.append(timeout_s)
        time.sleep(timeout_s)
        return "not done"

    monkeypatch.setattr(scale, "run", slow)
    assert scale.main(arguments(tmp_path, "--total-s", "0.2")) == 1
    (limit,) = limits
    assert limit <= 0.2
    skipped = json.loads((tmp_path / "scale.json").read_text())["skipped"]
    assert skipped == {"host, threads, 1": "not done", "host, threads, 2": "no time was left"}


def test_more_gpus_than_there_are_are_refused(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scale, "touch", pytest.fail)
    assert scale.main(["--ranks", "1", "64"]) == 2
    assert "--ranks 64: there are " in capsys.readouterr().err


def test_memory_is_touched_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, simulator: Simulator, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment(build().parent).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(scale, "SLACK_GIB", 0.0)
    monkeypatch.setattr(scale, "BESIDE_GIB", 0.01)
    chosen = scale.parse(["--weights-gib", "0.01", "--plain-gib", "0.01"])
    assert scale.touch(chosen, 2, time.monotonic() + 60)["touched_gib"] == 0
    assert capsys.readouterr().err == ""
    scale.touch(chosen, 2, time.monotonic())
    assert "the host gave 0 of 0 GiB" in capsys.readouterr().err
