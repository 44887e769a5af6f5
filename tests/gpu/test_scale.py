"""The benchmark of many GPUs, with little memory, on the one or two that are here."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from benchmarks import scale
from benchmarks.scaling.cases import CASES
from benchmarks.scaling.spec import Row, Spec
from tests.bench.scaling import check_rows

COUNTS = [count for count in (1, 2) if count <= torch.cuda.device_count()]
LAYOUTS = ["processes", "threads", "single"]
if importlib.util.find_spec("ray"):
    LAYOUTS.append("ray")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["cumem", "cumem+checkpoint"])
def test_every_case_is_measured(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts = [name for name in LAYOUTS if backend == "cumem" or name != "threads"]
    arguments = ["--backend", backend, "--layout", *layouts, "--ranks", *map(str, COUNTS)]
    sizes = ["--weights-gib", "2", "--kv-gib", "2", "--plain-gib", "1", "--rounds", "2"]
    sizes.append("--coordination")  # of no ranks: that needs no GPU
    code = scale.main([*arguments, *sizes, "--out", str(tmp_path)])
    said = capsys.readouterr()
    assert code == 0, said.err + said.out
    result = json.loads((tmp_path / "scale.json").read_text())
    for layout in layouts:
        for count in COUNTS:
            spec = Spec(layout, backend, count, 2, 2, 256, 1, rounds=2)
            rows = [Row(**row) for row in result["rows"]]
            mine = [row for row in rows if (row.layout, row.ranks) == (layout, count)]
            check_rows(mine, spec, set(CASES))
