"""What of the scripts in ``benchmarks/`` runs without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import arena, deadlock, orchestrator_overhead, process_checkpoint
from benchmarks.arena import MIB, Setting, Times
from sleepbackends.availability import Availability
from sleepbackends.bench.rows import OURS
from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.vmm import arena as module
from tests.simulators.cuda import Simulator


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
    monkeypatch.setattr("sleepbackends.bench.peers.find_spec", lambda name: None)
    assert deadlock.main(["--only", "vllm"]) == 0
    assert "vllm is skipped" in capsys.readouterr().err
    monkeypatch.setattr(deadlock, "run", lambda *_: ("hangs", {}))
    assert deadlock.main(["--only", OURS]) == 1


def test_the_orchestrator_adds_less_than_a_millisecond_with_a_thousand_blocks() -> None:
    figures = orchestrator_overhead.measure()
    assert set(figures) == {"sleep", "wake_up", "release"}
    # The best of the rounds: others may be at work on the machine.
    assert all(row["best_ms"] < 1.0 for row in figures.values()), figures


def test_the_arena_is_measured_with_every_setting_in_turn(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = [Setting(1, 2), Setting(2, 2)]
    used: list[tuple[int, int]] = []
    measure_one = arena.measure_one

    def note(driver: CudaDriver, address: int, size_bytes: int) -> Times:
        used.append((module.CHUNK_BYTES, module.THREADS))
        before = simulator.calls("cuMemHostRegister")
        times = measure_one(driver, address, size_bytes)
        chunks = -(-size_bytes // module.CHUNK_BYTES)
        assert simulator.calls("cuMemHostRegister") - before == chunks
        return times

    monkeypatch.setattr(arena, "measure_one", note)
    before = module.CHUNK_BYTES, module.THREADS
    driver = CudaDriver()
    found = arena.measure(driver, 6 * MIB, grid, 3)
    driver.close()
    small, large = (MIB, 2), (2 * MIB, 2)
    assert used == [small, large, large, small, small, large]
    assert before == (module.CHUNK_BYTES, module.THREADS)
    assert {setting: len(times) for setting, times in found.items()} == dict.fromkeys(grid, 3)
    assert all(0 < t.ready_s <= t.copied_s for times in found.values() for t in times)
    usage = simulator.process_usage()
    assert (usage.pinned_bytes, usage.pageable_copy_bytes) == (0, 0)
    assert simulator.device_usage().used_bytes == 0
    assert arena.markdown(6 * MIB, found).splitlines()[3] == "| chunks | 2 threads |"


def test_the_table_of_the_arena_holds_medians() -> None:
    found = {
        Setting(chunk, threads): [Times(s * threads, s * chunk, 0.5) for s in (0.1, 9.0, 0.2)]
        for chunk in (4, 8)
        for threads in (1, 2)
    }
    lines = arena.markdown(1 << 30, found).splitlines()
    assert lines[:2] == [
        "Seconds until 1 GiB are ready / and copied into, medians of 3 rounds.",
        "The copy alone takes 0.500 s (2.0 GiB/s).",
    ]
    assert lines[5:] == [
        "| 4 MiB | 0.200 / 0.800 (1.60x) | 0.400 / 0.800 (1.60x) |",
        "| 8 MiB | 0.200 / 1.600 (3.20x) | 0.400 / 1.600 (3.20x) |",
    ]


def test_without_a_gpu_the_arena_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "probe", lambda: Availability(False, "no GPU", "buy one"))
    with pytest.raises(SystemExit, match=r"nothing can be measured here: no GPU .buy one."):
        arena.main([])


@pytest.mark.parametrize("wrong", [["--gib", "0"], ["--threads", "0"], ["--rounds", "-1"]])
def test_wrong_arguments_of_the_arena(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        arena.main(wrong)
    assert caught.value.code == 2


def test_checkpoints_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def cycle(suspend: float, resume: float, right: bool = True) -> dict[str, Any]:
        return {"suspend": suspend, "resume": resume, "left_bytes": 0, "right": right}

    alone = [cycle(24.0, 8.0), cycle(26.0, 8.0)]
    above = [cycle(2.5, 4.0, right=False)] * 3
    text = process_checkpoint.table([("checkpoint", alone), ("both", above)], 16, 32)
    assert "| checkpoint | 2 | 25.000 | 8.000 | 0 | yes |" in text
    assert "| both | 3 | 2.500 | 4.000 | 0 | NO |" in text
    assert "both: suspend 10.0 times faster (at least 8)" in text
    assert "both: resume 2.0 times faster (LESS THAN 4)" in text
