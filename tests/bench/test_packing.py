"""The benchmark of packing: that it runs, over the simulated driver, and what it makes of times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import packing
from benchmarks.packing import LINK, Row
from sleepbackends.availability import Availability
from sleepbackends.bench import machine
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.vmm.packing import packer
from sleepbackends.vmm.region import DeviceMemory
from tests.native.fixtures import kernel_images, native_library, simulator
from tests.packing import contents
from tests.simulators.cuda import Simulator

__all__ = ["kernel_images", "native_library", "simulator"]


class Drawn:
    """Raw memory in place of tensors."""

    def __init__(self, backend: CumemBackend, kind: str, count: int, size_bytes: int) -> None:
        with backend.region("weights") as region:
            self._memory: list[DeviceMemory] = [region.buffer(size_bytes) for _ in range(count)]
        self._kind = kind

    def _contents(self, number: int, index: int) -> bytes:
        return contents(self._kind, self._memory[index].size_bytes, 100 * number + index)

    def draw(self, number: int) -> None:
        for index, memory in enumerate(self._memory):
            memory.write(self._contents(number, index))

    def check(self, number: int) -> None:
        for index, memory in enumerate(self._memory):
            assert memory.read() == self._contents(number, index)

    def free(self) -> None:
        for memory in self._memory:
            memory.free()


class Plain:
    def __init__(self, size_bytes: int) -> None:
        assert size_bytes == 4 << 20

    def seconds(self, *, down: bool) -> float:
        return 1.0 if down else 2.0


def test_it_runs(
    simulator: Simulator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(CumemBackend, "probe", lambda: Availability(True))
    monkeypatch.setattr(machine, "describe", lambda: {"gpu": "a simulated one"})
    monkeypatch.setattr(packing, "describe", machine.describe)
    monkeypatch.setattr(packing, "do_once", lambda size_bytes, _: size_bytes)
    monkeypatch.setattr(packing, "synchronize", lambda: None)
    monkeypatch.setattr(packing, "Drawn", Drawn)
    monkeypatch.setattr(packing, "Plain", Plain)
    monkeypatch.setattr(packer, "LEAST_BYTES", 1 << 20)
    out = tmp_path / "packing.json"
    packing.main(["--gib", str(4 / 1024), "--tensor-mib", "2", "--rounds", "2", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "a simulated one" in printed
    table = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(packing.CONTENTS) * len(packing.CASES) * len(packing.MODES)
    cells = {tuple(cell.strip() for cell in row[:3]): row[6].strip() for row in table[2:]}
    for case in packing.CASES:
        assert 0.69 < float(cells["weights", case, "auto"]) < 0.72
        for other in (("weights", case, "off"), ("random", case, "auto")):
            assert 1.0 <= float(cells[other]) < 1.001
    rows = [Row(**row) for row in json.loads(out.read_text())["rows"]]
    assert packing.markdown(rows, 4 / 1024) in printed
    assert simulator.process_usage().pinned_bytes == 0


def test_findings_are_of_medians_within_the_run() -> None:
    times = {
        (LINK, "suspend"): [4.0, 2.0, 2.0],
        (LINK, "resume"): [1.0],
        ("off", "suspend"): [2.0, 2.0, 9.0],
        ("off", "resume"): [1.0],
        ("auto", "suspend"): [1.6, 9.0, 1.6],
        ("auto", "resume"): [0.8],
    }
    rows = [
        Row(contents, mode, case, number, seconds, 0.7 if contents == "weights" else 1.0)
        for contents in packing.CONTENTS
        for (mode, case), found in times.items()
        for number, seconds in enumerate(found)
    ]
    said = packing.markdown(rows, 8.0)
    assert "| weights | suspend | auto | 1.6000 | 5.0 | 1.25 | 0.7000 |" in said
    assert "suspend of 8 GiB of weights: 1.25 times the link (4.0 GiB/s in this run)" in said
    assert "1.25 times as fast as without packing; random bits: -20.0% with packing." in said
    assert "Host bytes: 0.7000 of the weights, 1.0000 of random bits." in said


def test_without_a_gpu_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CumemBackend, "probe", lambda: Availability(False, "no GPU"))
    with pytest.raises(SystemExit, match="nothing can be measured here: no GPU"):
        packing.main([])
