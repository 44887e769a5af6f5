"""What of the benchmarks of a vLLM engine runs without a GPU: processes and verdicts."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks import vllm_faults, vllm_processes, vllm_sleep, vllm_unchosen
from benchmarks.vllm_engine import GIB, MIB
from benchmarks.vllm_processes import Found, Turns
from benchmarks.vllm_sleep import OURS, STAGED, UNPACKED, VLLM

STAND_IN = "import sys\nclass LLM: ...\nclass SamplingParams: ...\n"


# Processes


def stand_in(folder: Path, code: str) -> dict[str, str | None]:
    """Have a process import this in the place of vLLM."""
    (folder / "vllm.py").write_text(STAND_IN + code, encoding="utf-8")
    return {"PYTHONPATH": str(folder)}


def run(folder: Path, code: str, timeout_s: float = 60) -> Found:
    cases = {vllm_faults.ROOM: stand_in(folder, code)}
    with Turns("benchmarks.vllm_faults", cases, [], folder) as turns:
        return turns.run(vllm_faults.ROOM, timeout_s)


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    found = run(tmp_path, "raise RuntimeError('no driver')")
    assert found.problem == "exit code 1: RuntimeError: no driver"
    assert not found.hung


def test_a_process_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_processes, "IMPORTS_S", 0.0)
    found = run(tmp_path, "import time; time.sleep(60)", timeout_s=0.5)
    assert found.problem == "no end within 0 s"


def test_what_was_noted_before_it_failed_is_not_lost(tmp_path: Path) -> None:
    noted = f"open({str(tmp_path / 'vllm-room.jsonl')!r}, 'w').write('{{\"calls\": 3}}\\n')"
    found = run(tmp_path, f"{noted}\nsys.exit(7)")
    assert found.problem.startswith("exit code 7")
    assert found.facts == {"calls": 3}


def test_a_process_ends_with_the_scope(tmp_path: Path) -> None:
    cases = {vllm_faults.ROOM: stand_in(tmp_path, "")}
    with Turns("benchmarks.vllm_faults", cases, [], tmp_path) as turns:
        (process,) = turns._processes.values()
    assert process.returncode is not None


def test_what_hangs_is_told_from_what_fails() -> None:
    code = "import faulthandler, time; faulthandler.dump_traceback_later(0.1, exit=True)\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}time.sleep(30)"], capture_output=True, text=True, check=False
    )
    assert Found(log=done.stderr).hung
    assert not Found(log="RuntimeError: Timeout (of a queue)").hung


# Sleep and wake-up


def cycles(first: float, later: float, wake: float, free_mib: int) -> Found:
    rows = [
        {
            "cycle": number,
            "sleep_s": later if number else first,
            "wake_s": wake,
            "asleep_free_bytes": free_mib * MIB,
            "host_taken_bytes": 15 * GIB,
            "tokens_equal": True,
            "weights_equal": True,
        }
        for number in range(vllm_sleep.CYCLES)
    ]
    return Found([{"allocator": OURS}, *rows])


@pytest.fixture
def slept() -> dict[str, Found]:
    found = {
        VLLM: cycles(9.0, 0.35, 0.48, 1000),
        OURS: cycles(1.0, 0.02, 0.34, 1002),
        STAGED: cycles(0.02, 0.02, 0.34, 1002),
        UNPACKED: cycles(1.0, 0.02, 0.45, 1002),
    }
    found[VLLM].rows[0]["allocator"] = VLLM
    found[STAGED].rows[0]["stage_s"] = 2.0
    return found


def test_promises_that_are_kept(slept: dict[str, Found]) -> None:
    lines, right = vllm_sleep.compare(slept, promised=True)
    assert right
    assert (
        "| first sleep | 9 s | 1 s | 9 times, promised 5 | 0.02 s | 450 times, promised 100 |"
        " 1 s | 9 times |" in lines
    )
    wakes = "A later wake-up is 1.324 times faster with packing than without, promised 1.2."
    assert f"\n{wakes}" in lines
    assert "\nStaging took 2.00 s, beside an engine that could serve." in lines


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [
        (OURS, "sleep_s", 2.0),
        (STAGED, "sleep_s", 0.2),
        (OURS, "wake_s", 0.5),
        (UNPACKED, "wake_s", 0.4),
        (OURS, "asleep_free_bytes", 999 * MIB),
    ],
)
def test_promises_that_are_not(slept: dict[str, Found], case: str, name: str, value: float) -> None:
    for row in slept[case].rows[1:]:
        row[name] = value
    lines, right = vllm_sleep.compare(slept, promised=True)
    assert not right
    assert "NOT kept" in "".join(lines)
    assert vllm_sleep.compare(slept, promised=False)[1], "a small model promises nothing"


def test_what_cannot_be_compared(slept: dict[str, Found]) -> None:
    slept[OURS].rows[2]["tokens_equal"] = False
    slept[STAGED].rows[0]["allocator"] = "vllm"
    slept[VLLM].problem = "no end within 270 s"
    text = "\n".join(vllm_sleep.compare(slept, promised=False)[0])
    assert "| first sleep | failed | failed |  | failed |  | 1 s |  |" in text
    assert "sleepbackends: other tokens after a wake-up" in text
    assert "staged: it used the allocator of vllm" in text
    assert "vllm: no end within 270 s" in text
    del slept[OURS].rows[2:]
    assert vllm_sleep.judge(OURS, slept[OURS]) == f"1 of {vllm_sleep.CYCLES} cycles"


# Faults

RIGHT: dict[str, Any] = {
    "allocator": "sleepbackends",
    "calls": 1000,
    "first_wake": "DeviceMemoryError: no room",
    "taken_bytes": 0,
    "asleep_after": True,
    "missing_bytes": 0,
    "later_wake": "works",
    "awake_after": True,
    "tokens_equal": True,
    "ended": True,
}


def test_ours_is_right() -> None:
    assert vllm_faults.wrong(Found([RIGHT])) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allocator", "vllm"),
        ("calls", 0),
        ("first_wake", "works"),
        ("taken_bytes", GIB),
        ("asleep_after", False),
        ("later_wake", "RuntimeError: mapped twice"),
        ("awake_after", False),
        ("tokens_equal", False),
    ],
)
def test_ours_is_wrong(name: str, value: object) -> None:
    assert len(vllm_faults.wrong(Found([{**RIGHT, name: value}]))) == 1


@pytest.mark.parametrize("name", [name for name in RIGHT if name != "missing_bytes"])
def test_what_was_not_seen_is_wrong(name: str) -> None:
    rows = [{key: value for key, value in RIGHT.items() if key != name}]
    assert len(vllm_faults.wrong(Found(rows))) == 1


def test_both_sides_are_in_the_table() -> None:
    room = {"first_wake": "RuntimeError: out | of memory", "taken_bytes": GIB}
    found = {
        "sleepbackends": Found([RIGHT]),
        "vllm-room": Found([room], "exit code 1: lost"),
        "vllm-polled": Found([], "exit code 1: lost", "Timeout (0:00:20)!\nThread"),
    }
    lines = vllm_faults.markdown(found).splitlines()
    assert (
        "| loads while a thread calls `torch.cuda.memory_stats()` | hangs | loads, 1000"
        in (lines[2])
    )
    assert (
        "| `wake_up()` without room | RuntimeError: out   of memory | DeviceMemoryError: no room |"
        in lines
    )
    assert "| memory taken by that | 1024 MiB | 0 MiB |" in lines
    assert "| tokens equal | not seen | yes |" in lines


def test_without_vllm_they_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (vllm_sleep, vllm_faults, vllm_unchosen):
        monkeypatch.setattr(module, "find_spec", lambda _: None)
        assert module.main([]) == 2
        assert "vLLM is not installed" in capsys.readouterr().err


# Not chosen


@pytest.fixture
def alike() -> dict[str, Found]:
    steps = {"loaded": {"allocated_bytes.all.current": 500, "device_bytes": GIB}}
    facts = {"tokens": [[1]], "allocator": "vllm", "steps": steps}
    here = (vllm_unchosen.UNCHOSEN, vllm_unchosen.CHOSEN_OFF)
    return {
        case: Found([deepcopy({**facts, "plugin": case in here})]) for case in vllm_unchosen.CASES
    }


def test_nothing_differs(alike: dict[str, Found]) -> None:
    alike["unchosen"].rows[0]["steps"]["loaded"]["device_bytes"] += MIB
    assert vllm_unchosen.differences(alike) == []
    text = vllm_unchosen.markdown(alike)
    assert text.count("| loaded | allocated_bytes.all.current | 500 | 500 |") == 2


@pytest.mark.parametrize(
    ("name", "value"), [("tokens", [[2]]), ("allocator", "sleepbackends"), ("plugin", False)]
)
def test_behaviour_that_differs(alike: dict[str, Found], name: str, value: object) -> None:
    alike["chosen-off"].rows[0][name] = value
    assert len(vllm_unchosen.differences(alike)) == 1


@pytest.mark.parametrize(
    ("name", "by"), [("allocated_bytes.all.current", 1), ("device_bytes", GIB)]
)
def test_memory_that_differs(alike: dict[str, Found], name: str, by: int) -> None:
    alike["unchosen"].rows[0]["steps"]["loaded"][name] += by
    assert len(vllm_unchosen.differences(alike)) == 1


def test_a_process_that_failed_is_no_comparison(alike: dict[str, Found]) -> None:
    alike["absent"] = Found([], "exit code 1: lost")
    assert vllm_unchosen.differences(alike) == ["absent: exit code 1: lost"]


HIDING = """
from importlib import metadata
from benchmarks.vllm_unchosen import hide_plugin
assert "sleepbackends" in {e.name for e in metadata.entry_points(group="vllm.general_plugins")}
hide_plugin()
from importlib.metadata import entry_points
assert "sleepbackends" not in {e.name for e in entry_points(group="vllm.general_plugins")}
assert entry_points(group="console_scripts")
import sys
assert not {name for name in sys.modules if name.partition(".")[0] in ("sleepbackends", "torch")}
"""


def test_a_plugin_that_is_hidden_is_not_found() -> None:
    root = vllm_processes.ROOT
    subprocess.run([sys.executable, "-c", HIDING], check=True, cwd=root)
