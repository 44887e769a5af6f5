from __future__ import annotations

import dataclasses

import pytest

from sleepbackends.bench.rows import (
    CASES,
    MEANINGS,
    OURS,
    PLAIN_COPY,
    Row,
    Workload,
    chosen,
    link_rates,
    median_of,
    share_of_link,
    two_devices,
    workloads,
)

BASE = Row(PLAIN_COPY, "suspend_dirty", 16, 32, 256, 0, 0.32)


def rows_of(*values: tuple[str, str, float]) -> list[Row]:
    return [dataclasses.replace(BASE, peer=p, case=c, seconds=s) for p, c, s in values]


def test_a_row_is_read_back_from_what_is_kept() -> None:
    assert Row(**BASE.to_json()) == BASE
    assert list(BASE.to_json()) == [
        *("peer", "case", "weights_gib", "kv_gib", "tensor_mib"),
        *("round", "seconds", "fill", "devices"),
    ]


def test_every_case_has_a_meaning() -> None:
    assert set(MEANINGS) == set(CASES)


def test_medians_of_what_is_chosen() -> None:
    rows = rows_of(*((OURS, "resume", seconds) for seconds in (9.0, 0.4, 0.1)))
    rows += rows_of((OURS, "suspend_dirty", 5), ("vllm", "resume", 7))
    assert median_of(rows, peer=OURS, case="resume") == 0.4
    assert median_of(rows, peer=OURS, case="resume", fill="zero") is None
    assert chosen(rows, peer="vllm") == rows[-1:]


def test_workloads_have_no_plain_copies_and_begin_with_large_tensors() -> None:
    rows = rows_of((OURS, "resume", 1), (PLAIN_COPY, "resume", 1))
    rows += [dataclasses.replace(row, tensor_mib=512) for row in rows]
    rows += [dataclasses.replace(rows[0], weights_gib=4)]
    assert [workload for workload, _ in workloads(rows)] == [
        *(Workload(4, 32, 256), Workload(16, 32, 512), Workload(16, 32, 256))
    ]
    assert all(len(of_it) == 1 for _, of_it in workloads(rows))


def test_the_link_is_that_of_copies_of_as_much() -> None:
    rows = rows_of((PLAIN_COPY, "suspend_dirty", 0.32), (PLAIN_COPY, "resume", 0.16))
    rows.append(dataclasses.replace(rows[0], weights_gib=4, seconds=0.1))
    rows.append(dataclasses.replace(rows[0], devices="0+1", seconds=0.001))
    assert link_rates(rows, 16) == pytest.approx({"down_gib_s": 50, "up_gib_s": 100})
    assert link_rates(rows, 4) == pytest.approx({"down_gib_s": 40, "up_gib_s": 100})
    assert link_rates(rows, 5) == link_rates(rows)
    assert link_rates(rows)["down_gib_s"] == 45
    assert link_rates([]) == {}


def test_the_share_of_the_link_is_told_where_all_bytes_cross_it() -> None:
    rows = rows_of((PLAIN_COPY, "suspend_dirty", 0.32), (PLAIN_COPY, "resume", 0.16))
    workload = Workload(16, 32, 256)
    assert share_of_link(rows, workload, "suspend_dirty", 0.4) == pytest.approx(0.8)
    assert share_of_link(rows, workload, "resume", 0.2) == pytest.approx(0.8)
    for case in ("suspend_clean", "suspend_1pct", "discard_kv"):
        assert share_of_link(rows, workload, case, 0.1) is None
    assert share_of_link(rows, workload, "resume", None) is None
    assert share_of_link([], workload, "resume", 0.2) is None


def test_one_device_is_compared_with_both() -> None:
    one = dataclasses.replace(BASE, peer=OURS, seconds=0.3)
    rows = [
        one,
        dataclasses.replace(one, devices="1", seconds=0.5),
        dataclasses.replace(one, devices="0+1", seconds=0.6),
        dataclasses.replace(one, weights_gib=4, devices="0+1"),
    ]
    assert list(two_devices(rows)) == [(one, 0.4, 0.6)]
