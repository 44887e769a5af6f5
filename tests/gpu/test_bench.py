"""The benchmark itself, with little memory."""

from __future__ import annotations

import pytest

from sleepbackends.bench.page import page
from sleepbackends.bench.request import Request, Spec
from sleepbackends.bench.rows import CASES, OURS, PLAIN_COPY, Row
from sleepbackends.bench.suspend_resume import measure


class Nobody:
    def begin(self, spec: Spec, number: int, count: int) -> None: ...

    def row(self, row: Row) -> None: ...

    def end(self, spec: Spec, problem: str) -> None: ...


@pytest.mark.timeout(600)
def test_every_case_is_measured() -> None:
    request = Request((0.25, 0.5), 1, (64, 1), rounds=2, only=(OURS,))
    result = measure(request, Nobody())
    assert result["skipped"] == {}
    rows = [Row(**row) for row in result["rows"]]
    assert all(row.seconds > 0 for row in rows)
    for weights_gib in request.weights_gib:
        for tensor_mib in request.tensor_mib:
            wanted = (OURS, weights_gib, tensor_mib)
            found = {r.case for r in rows if (r.peer, r.weights_gib, r.tensor_mib) == wanted}
            assert found == set(CASES)
    assert {row.case for row in rows if row.peer == PLAIN_COPY} == {"suspend_dirty", "resume"}
    assert result["link"].keys() == {"down_gib_s", "up_gib_s"}
    assert result["machine"]["gpu"] in page(result)
