"""The benchmark of the disk tier: that it runs, over the simulated driver, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import disk_tier
from sleepbackends.availability import Availability
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.vmm import places
from tests.native.fixtures import kernel_images, native_library, simulator
from tests.simulators.cuda import Simulator

__all__ = ["kernel_images", "native_library", "simulator"]

NAMES = ["plain write", "plain read", "suspend", "resume"]


def test_it_runs(
    simulator: Simulator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(CumemBackend, "probe", lambda: Availability(True))
    monkeypatch.setattr(places, "BUFFER_BYTES", 64 << 10)
    rounds = tmp_path / "rounds.json"
    gib = str((1_000_000 + 77) / disk_tier.GIB)
    saved = str(tmp_path / "saved")
    disk_tier.main(["--gib", gib, "--rounds", "2", "--directory", saved, "--json", str(rounds)])
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split("|")[1].strip() for line in lines[-4:]) == sorted(NAMES)
    found = json.loads(rounds.read_text())
    assert {name: len(values) for name, values in found["seconds"].items()} == dict.fromkeys(
        NAMES, 2
    )
    assert simulator.process_usage().pinned_bytes == 0


def test_ratios_are_of_the_medians() -> None:
    seconds = {"plain write": [1.0, 9.0, 2.0], "suspend": [4.0, 4.0, 1.0]}
    rows = disk_tier.table(2 * disk_tier.GIB, seconds).splitlines()[2:]
    assert rows == [
        "| plain write | 2.000 | 1.000 | 1.00 |  |",
        "| suspend | 4.000 | 1.000 | 0.50 | 50% (plain write) |",
    ]


def test_without_a_gpu_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CumemBackend, "probe", lambda: Availability(False, "no GPU"))
    with pytest.raises(SystemExit, match="does not work here: no GPU"):
        disk_tier.main([])
