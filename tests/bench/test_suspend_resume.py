"""A whole run, with other processes in place of those that need a GPU."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.availability import Availability
from sleepbackends.bench import suspend_resume
from sleepbackends.bench.request import DESCRIBE, Request, Spec
from sleepbackends.bench.rows import CASES, IN_TURN, OURS, PEERS, PLAIN_COPY, STAGED
from sleepbackends.bench.suspend_resume import Result, has_failed, measure, run
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.errors import BackendUnavailableError, RequestError

from .conftest import MACHINE, Silent, Take


def test_everything_is_measured_and_kept(ran: list[Spec], folder: Path) -> None:
    watch = Silent()
    request = Request(tensor_mib=(256, 1), rounds=3, peers=folder, vllm_version="9.9")
    result = measure(request, watch)
    assert ran == request.specs()
    assert result["machine"]["gpu"] == "Made-up 9000"
    assert (result["machine"]["vllm"], result["machine"]["torch_memory_saver"]) == ("9.9", "1.2.3")
    assert result["skipped"] == {}
    assert not has_failed(result)
    assert result["link"] == pytest.approx({"down_gib_s": 16 / 0.3, "up_gib_s": 16 / 0.3})
    ours, peers = len(CASES) - 1, len(CASES) - 3
    assert len(result["rows"]) == 3 * (4 + 6 + 2 + 2 * (3 * peers + 2 * ours + 1))
    assert len([what for what, _ in watch.told if what == "row"]) == len(result["rows"])
    begun = [told for told in watch.told if "/" in told[0]]
    titles = ["in_turn", "plain_copy, 16 GiB", "in_turn, 16 GiB"]
    assert begun[:3] == [(f"{number}/15", title) for number, title in enumerate(titles, 1)]
    assert watch.told[0] == begun[0]
    assert watch.told[-1] == ("end", "")


def test_what_is_known_is_kept_as_it_comes(ran: list[Spec], folder: Path) -> None:
    kept: list[Result] = []
    result = measure(Request(tensor_mib=(20,), peers=folder), Silent(), kept.append)
    assert len(kept) == len(ran)
    counts = [len(each["rows"]) for each in kept]
    assert counts == sorted(counts)
    assert counts[0] > 0
    for number, each in enumerate(kept, 1):
        missing = {spec.title: "the run ended before" for spec in ran[number:]}
        assert each["skipped"] == missing
    assert kept[-1] == result


def test_a_run_that_is_cut_keeps_the_rows_it_has(
    ran: list[Spec], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, kept = suspend_resume.run, list[Result]()

    def cut(spec: Spec, timeout_s: float, take: Take) -> str:
        problem = work(spec, timeout_s, take)
        if spec.peer == "vllm":
            raise KeyboardInterrupt
        return problem

    monkeypatch.setattr(suspend_resume, "run", cut)
    with pytest.raises(KeyboardInterrupt):
        measure(Request(tensor_mib=(20,), peers=folder), Silent(), kept.append)
    assert any(row["peer"] == "vllm" for row in kept[-1]["rows"])
    assert next(iter(kept[-1]["skipped"])) == "vllm, 16 GiB, tensors of 20 MiB"
    assert has_failed(kept[-1])


def test_absent_peers_are_skipped_and_said_so(ran: list[Spec], folder: Path) -> None:
    absent = folder / "vllm" / "vllm" / "device_allocator"
    absent.rmdir()
    result = measure(Request(tensor_mib=(20,), peers=folder), Silent())
    assert {spec.peer for spec in ran} == {IN_TURN, PLAIN_COPY, OURS, STAGED, "tms", "tms_retain"}
    turns = [spec.among for spec in ran if spec.peer == IN_TURN]
    assert turns == [[OURS, "tms"], [OURS, "tms_retain"]]
    assert result["skipped"] == {"vllm": f"{absent} is not there"}
    assert "vllm" not in result["machine"]
    assert not has_failed(result)


def test_without_a_folder_the_peers_have_to_be_installed(
    ran: list[Spec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sleepbackends.bench.peers.find_spec", lambda name: None)
    result = measure(Request(tensor_mib=(20,)), Silent())
    assert {spec.peer for spec in ran} == {PLAIN_COPY, OURS, STAGED}
    assert set(result["skipped"]) == {*PEERS, IN_TURN, f"{IN_TURN}, 16 GiB"}
    assert not has_failed(result)


@pytest.mark.parametrize(
    ("failing", "failed"), [("tms", False), (OURS, True), (PLAIN_COPY, True), (IN_TURN, False)]
)
def test_a_peer_may_fail_and_ours_may_not(
    ran: list[Spec], folder: Path, monkeypatch: pytest.MonkeyPatch, failing: str, failed: bool
) -> None:
    work = suspend_resume.run

    def fail_one(spec: Spec, timeout_s: float, take: Take) -> str:
        work(spec, timeout_s, take)
        return "exit code 1: bytes differ" if spec.peer == failing else ""

    monkeypatch.setattr(suspend_resume, "run", fail_one)
    watch, request = Silent(), Request(tensor_mib=(20,), peers=folder)
    result = measure(request, watch)
    assert set(result["skipped"].values()) == {"exit code 1: bytes differ"}
    assert all(title.startswith(failing) for title in result["skipped"])
    assert ("end", "exit code 1: bytes differ") in watch.told
    assert has_failed(result) == failed
    monkeypatch.setattr(suspend_resume, "run", work)
    whole = measure(request, watch)
    assert len(result["rows"]) == len(whole["rows"]), "rows that are known are kept"


@pytest.mark.parametrize(
    ("facts", "request_", "message"),
    [
        ({"gpu_count": 1}, Request(devices=2), "there is one CUDA device"),
        ({"gpu_gib": 40.0}, Request(), "48 GiB do not fit: Made-up 9000 has 40 GiB"),
    ],
)
def test_a_machine_that_is_too_small(
    ran: list[Spec],
    monkeypatch: pytest.MonkeyPatch,
    facts: dict[str, Any],
    request_: Request,
    message: str,
) -> None:
    for name, value in facts.items():
        monkeypatch.setitem(MACHINE, name, value)
    with pytest.raises(RequestError, match=message):
        measure(request_, Silent())
    assert not ran


def test_without_a_gpu_the_probe_says_why(ran: list[Spec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CumemBackend, "probe", lambda: Availability(False, "no GPU", "buy one"))
    with pytest.raises(BackendUnavailableError, match=r"nothing .* here: no GPU .buy one.$"):
        measure(Request(), Silent())


@pytest.mark.parametrize(
    ("answer", "problem", "message"),
    [
        ({"problem": "torch sees no GPU", "hint": "another torch"}, "", "no GPU .another torch.$"),
        (None, "exit code 1: no room", "here: exit code 1: no room"),
    ],
)
def test_a_device_that_torch_cannot_use(
    ran: list[Spec],
    monkeypatch: pytest.MonkeyPatch,
    answer: dict[str, Any] | None,
    problem: str,
    message: str,
) -> None:
    def run(spec: Spec, timeout_s: float, take: Take) -> str:
        if answer is not None:
            take(answer)
        return problem

    monkeypatch.setattr(suspend_resume, "run", run)
    with pytest.raises(BackendUnavailableError, match=message):
        measure(Request(), Silent())


# The processes


def instead(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have this code run in place of the measurement: ``rows`` is the open file."""
    head = "import os, sys, time\nrows = open(sys.argv[1], 'w', buffering=1)\n"

    def command(module: str, spec: str, path: str) -> list[str]:
        return [sys.executable, "-c", head + code, path]

    monkeypatch.setattr(suspend_resume, "python_command", command)


def test_rows_are_taken_as_they_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    go = tmp_path / "go"
    instead(
        monkeypatch,
        'rows.write(\'{"a": 1}\\n{"a"\'); rows.flush()\n'
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "rows.write(': 2}\\n{\"a\": 3}\\n')\n",
    )
    taken: list[dict[str, Any]] = []

    def take(values: dict[str, Any]) -> None:
        taken.append(values)
        go.touch()  # the process waits for this, so the first came before its end

    assert run(Spec(OURS), 30, take) == ""
    assert taken == [{"a": 1}, {"a": 2}, {"a": 3}]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("sys.exit('one\\ntwo\\n')", "exit code 1: two"),
        ("os._exit(3)", "exit code 3: no message"),
        ("sys.stderr.buffer.write(b'bad \\xff'); sys.exit(4)", "exit code 4: bad \ufffd"),
        ("os.kill(os.getpid(), 9)", "exit code -9: no message"),
        ("print('x' * 1000000)", ""),
        ("assert not sys.stdin.read()", ""),
    ],
)
def test_how_a_process_ended(monkeypatch: pytest.MonkeyPatch, code: str, problem: str) -> None:
    instead(monkeypatch, code)
    assert run(Spec(OURS), 30, lambda values: None) == problem


def test_a_process_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, 'rows.write(\'{"a": 1}\\n{"a"\'); rows.flush(); time.sleep(60)')
    taken: list[dict[str, Any]] = []
    started = time.monotonic()
    assert run(Spec(OURS), 1.0, taken.append) == "not done after 1 s"
    assert taken == [{"a": 1}]
    assert time.monotonic() - started < 20


def test_a_process_ends_with_whoever_watches_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    instead(monkeypatch, "rows.write('{\"a\": %d}\\n' % os.getpid()); time.sleep(60)")
    taken: list[int] = []

    def take(values: dict[str, Any]) -> None:
        taken.append(values["a"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Spec(OURS), 30, take)
    assert len(taken) == 1
    assert not Path(f"/proc/{taken[0]}").exists()


def test_the_real_process_says_what_it_cannot_do() -> None:
    answers: list[dict[str, Any]] = []
    problem = run(Spec(DESCRIBE), 60, answers.append)
    assert problem == ""
    if "problem" not in answers[0]:
        pytest.skip("there is a GPU")
    assert "torch" in answers[0]["problem"]
    assert "sleepbackends[torch]" in answers[0]["hint"]
    assert run(Spec("nobody", tensor_mib=1), 60, answers.append).startswith("exit code 1: ")
