"""What of the benchmarks runs without a GPU: arguments, order, files, tables."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import deadlock, orchestrator_overhead, suspend_resume, workload
from benchmarks.peers import PACKAGES, missing, open_allocator, version
from benchmarks.tables import (
    BOTH_DEVICES,
    CASES,
    IN_TURN,
    OURS,
    PEERS,
    PLAIN_COPY,
    Row,
    markdown,
)
from benchmarks.workload import Spec

SECONDS = {PLAIN_COPY: 0.3, OURS: 0.32, IN_TURN: 0.02, "vllm": 0.48, "tms": 6.4, "tms_retain": 0.4}
MACHINE = {"gpu": "Made-up 9000", "gpu_count": 2}

Answer = tuple[list[dict[str, Any]], str]


def measured(spec: Spec) -> list[dict[str, Any]]:
    """Rows as a process would write them: the rounds take 1, 2 and 3 times the least."""
    cases = ("suspend_dirty", "resume") if spec.peer == PLAIN_COPY else CASES
    devices = ("0",) if spec.devices == 1 else ("0", "1", BOTH_DEVICES)
    base = SECONDS[spec.peer] / 2
    return [
        spec.row(case, number, base * (number + 1), name).to_json()
        for number in range(3)
        for case in cases
        for name in devices
    ]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Spec]:
    """Replaces the processes; what they were to measure is kept here."""
    specs: list[Spec] = []

    def run(spec: Spec, timeout_s: float) -> Answer:
        specs.append(spec)
        return ([MACHINE], "") if spec.peer == "describe" else (measured(spec), "")

    monkeypatch.setattr(suspend_resume, "run", run)
    monkeypatch.setattr(suspend_resume, "touch_host_memory", lambda size_bytes: size_bytes)
    return specs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for package in PACKAGES.values():
        (tmp_path / package).mkdir(parents=True, exist_ok=True)
    (tmp_path / "tms" / "torch_memory_saver-1.2.3.dist-info").mkdir()
    return tmp_path


def test_everything_is_measured_in_order_and_kept(
    ran: list[Spec], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, tables = folder / "new" / "result.json", folder / "table.md"
    arguments = ["--peers", str(folder), "--tensor-mib", "256", "1", "--rounds", "3"]
    arguments += ["--out", str(out), "--markdown", str(tables), "--vllm-version", "9.9"]
    assert suspend_resume.main(arguments) == 0
    order = [(spec.peer, spec.tensor_mib, spec.fill) for spec in ran]
    of_size = [*((peer, "none") for peer in PEERS), (OURS, "none"), (OURS, "zero")]
    alone = [("describe", 0, "none"), (PLAIN_COPY, 0, "none"), (IN_TURN, 0, "none")]
    assert order[:3] == alone
    assert order[3:] == [(peer, size, fill) for size in (256, 1) for peer, fill in of_size]
    result = json.loads(out.read_text())
    assert result["machine"]["gpu"] == "Made-up 9000"
    assert result["machine"]["vllm"] == "9.9"
    assert result["machine"]["torch_memory_saver"] == "1.2.3"
    assert result["skipped"] == {}
    assert result["link"] == pytest.approx({"down_gib_s": 16 / 0.3, "up_gib_s": 16 / 0.3})
    assert len(result["rows"]) == 3 * (2 + len(CASES) + 2 * 5 * len(CASES))
    assert {"peer", "case", "weights_gib", "kv_gib", "tensor_mib", "round", "seconds"} < set(
        result["rows"][0]
    )
    assert tables.read_text() == markdown(result)
    assert capsys.readouterr().out.strip() == markdown(result).strip()


def test_absent_peers_are_skipped_and_said_so(
    ran: list[Spec], capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert suspend_resume.main(["--tensor-mib", "20"]) == 0
    assert {spec.peer for spec in ran} == {"describe", PLAIN_COPY, OURS}
    printed = capsys.readouterr().out
    assert "vllm, s" not in printed
    assert "- tms_retain: no folder of peers" in printed
    (folder / PACKAGES["vllm"]).rmdir()
    assert suspend_resume.main(["--tensor-mib", "20", "--peers", str(folder)]) == 0
    assert "vllm" not in {spec.peer for spec in ran}
    assert f"- vllm: {folder / PACKAGES['vllm']} is not there" in capsys.readouterr().out


def test_a_peer_that_fails_is_noted_and_ours_may_not(
    ran: list[Spec],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, failing = suspend_resume.run, "tms"

    def fail_one(spec: Spec, timeout_s: float) -> Answer:
        rows, _ = run(spec, timeout_s)
        return (rows[:1], "exit code 1: bytes differ") if spec.peer == failing else (rows, "")

    monkeypatch.setattr(suspend_resume, "run", fail_one)
    arguments = ["--tensor-mib", "20", "--peers", str(folder)]
    assert suspend_resume.main(arguments) == 0
    assert "- tms, 20 MiB, fill none: exit code 1: bytes differ" in capsys.readouterr().out
    failing = OURS
    assert suspend_resume.main(arguments) == 1


def test_only_some_can_be_chosen(ran: list[Spec], folder: Path) -> None:
    suspend_resume.main(["--tensor-mib", "20", "--peers", str(folder), "--only", "vllm"])
    assert [spec.peer for spec in ran] == ["describe", PLAIN_COPY, "vllm"]


def test_two_devices(ran: list[Spec], capsys: pytest.CaptureFixture[str]) -> None:
    assert suspend_resume.main(["--devices", "2"]) == 0
    assert [(spec.peer, spec.devices) for spec in ran[1:]] == [(PLAIN_COPY, 2), (OURS, 2)]
    lines = capsys.readouterr().out.splitlines()
    assert f"| {OURS} resume | 0.320 | 0.320 | 2.00x |" in lines


def test_two_devices_need_two(ran: list[Spec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MACHINE, "gpu_count", 1)
    with pytest.raises(SystemExit, match="one CUDA device"):
        suspend_resume.main(["--devices", "2"])


@pytest.mark.parametrize("arguments", [["--rounds", "1"], ["--devices", "3"], ["--only", "x"]])
def test_wrong_arguments_are_refused(ran: list[Spec], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        suspend_resume.main(arguments)
    assert caught.value.code == 2
    assert not ran


def rows_of(*values: tuple[str, str, float]) -> list[dict[str, Any]]:
    base = Row(PLAIN_COPY, "suspend_dirty", 16, 32, 256, 0, 0.32)
    return [
        dataclasses.replace(base, peer=peer, case=case, seconds=seconds).to_json()
        for peer, case, seconds in values
    ]


def test_tables_hold_medians_shares_and_ratios() -> None:
    rows = rows_of(
        (PLAIN_COPY, "suspend_dirty", 0.32),
        (PLAIN_COPY, "resume", 0.16),
        *((OURS, "suspend_dirty", seconds) for seconds in (9.0, 0.4, 0.1)),
        (OURS, "resume", 0.2),
        (OURS, "discard_kv", 0.01),
        ("vllm", "suspend_dirty", 0.5),
        ("vllm", "discard_kv", 0.02),
    )
    zeroed = dataclasses.replace(Row(**rows[-1]), peer=OURS, case="resume_kv", fill="zero")
    small = [{**row, "tensor_mib": 1, "seconds": 0.5} for row in rows if row["peer"] == OURS]
    text = markdown({"machine": MACHINE, "rows": [*rows, zeroed.to_json(), *small]})
    assert "50.0 GiB/s down, 100.0 GiB/s up" in text
    lines = text.splitlines()
    assert "| suspend_dirty | 0.400 | 80.0% | 0.500 (1.25x) |" in lines
    assert "| resume | 0.200 | 80.0% |  |" in lines
    assert "| discard_kv | 0.0100 |  | 0.0200 (2.00x) |" in lines
    assert "| resume_kv, zero-filled | 0.0200 |  |  |" in lines
    assert "| 1 against 256 MiB | 1.25x | 2.50x |" in lines


def test_a_process_writes_rows_that_are_read_back(tmp_path: Path) -> None:
    """What cannot be measured here is said, by a process and by the whole."""
    if workload.describe().get("problem", "") == "":
        pytest.skip("there is a GPU")
    rows, problem = suspend_resume.run(Spec("describe"), 60)
    assert (len(rows), problem) == (1, "")
    assert rows[0]["problem"]
    with pytest.raises(SystemExit, match="nothing can be measured here"):
        suspend_resume.main(["--tensor-mib", "20"])
    _, problem = suspend_resume.run(Spec("nobody", tensor_mib=1), 60)
    assert problem.startswith("exit code 1")
    assert suspend_resume.run(Spec("describe"), 0.01)[1] == "not done after 0.01 s"


def test_host_memory_is_touched_and_given_back() -> None:
    assert suspend_resume.touch_host_memory(3_000_001) == 3_002_368


def test_peers_are_found_where_they_should_be(folder: Path) -> None:
    assert all(missing(peer, folder) == "" for peer in (OURS, *PEERS))
    assert (version("tms", folder), version("vllm", folder)) == ("1.2.3", "unknown")
    with pytest.raises(ValueError, match="no peer; known: sleepbackends, vllm"):
        open_allocator("nobody", folder)
    with pytest.raises(ValueError, match="vllm cannot be measured"):
        open_allocator("vllm", None)


def test_deadlocks_are_told_from_other_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    outcome, counts = deadlock.run(OURS, "memory_stats", 0.1)
    assert (outcome.partition(":")[0], counts) == ("exit code 1", {})
    monkeypatch.setattr(deadlock, "STARTUP_S", 0.0)
    assert deadlock.run(OURS, "memory_stats", 0.01) == ("hangs", {})

    def run(allocator: str, function: str, *_: Any) -> tuple[str, dict[str, int]]:
        return ("hangs" if allocator == "vllm" and "stats" in function else "runs"), {}

    monkeypatch.setattr(deadlock, "run", run)
    assert deadlock.main(["--peers", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| memory_stats | runs | hangs |" in lines
    assert "| empty_cache | runs | runs |" in lines
    assert deadlock.main(["--only", "vllm"]) == 0
    assert "vllm is skipped" in capsys.readouterr().err
    monkeypatch.setattr(deadlock, "run", lambda *_: ("hangs", {}))
    assert deadlock.main(["--only", OURS]) == 1


def test_the_orchestrator_adds_less_than_a_millisecond_with_a_thousand_blocks() -> None:
    figures = orchestrator_overhead.measure()
    assert set(figures) == {"sleep", "wake_up", "release"}
    # The best of the rounds: others may be at work on the machine.
    assert all(row["best_ms"] < 1.0 for row in figures.values()), figures
