"""What has to hold of the rows of ``benchmarks.scale``, wherever the ranks are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.scaling.cases import FAULTS, Measurement, expected, is_fault
from benchmarks.scaling.layouts import open_ranks
from benchmarks.scaling.spec import WHOLE_PROCESS, Row, Spec


def check_rows(rows: Sequence[Row], spec: Spec, cases: set[str]) -> None:
    """Every case was measured in every round, of all ranks, and no fault left them different."""
    rounds = {"first": {0}, "dirty": set(range(1, spec.rounds))}
    for case in cases:
        found = [row for row in rows if row.case == case]
        assert {row.round for row in found} == rounds.get(case, set(range(spec.rounds)))
        for row in found:
            assert (row.ranks, row.backend, row.layout) == (spec.ranks, spec.backend, spec.layout)
            assert row.seconds > 0
            assert len(row.rank_seconds) == (0 if spec.layout == "single" else spec.ranks)
    moved = [row for row in rows if row.case in ("first", "dirty", "resume")]
    assert all(row.size_bytes == spec.weights_bytes for row in moved)
    for row in moved:
        others = row.copied_bytes - spec.ranks * spec.weights_bytes
        assert others > 0 if WHOLE_PROCESS in spec.backend else others == 0
    faults = [row for row in rows if is_fault(row.case)]
    assert all(row.outcome == expected(row.case) for row in faults), faults
    if spec.layout == "single" or WHOLE_PROCESS in spec.backend:
        assert not faults
    else:
        killed = spec.ranks > 1 and spec.layout in ("processes", "ray")
        assert len(faults) == len(FAULTS) + killed


def measured(spec: Spec) -> tuple[list[Row], list[dict[str, Any]]]:
    """Return the rows, and what was found out about the ranks."""
    rows: list[Row] = []
    found: list[dict[str, Any]] = []
    with open_ranks(spec) as ranks:
        Measurement(ranks, spec, rows.append, found.extend).run()
    return rows, found
