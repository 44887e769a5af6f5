from __future__ import annotations

import dataclasses

from sleepbackends.bench.request import Request
from sleepbackends.bench.rows import OURS, PLAIN_COPY, Row
from sleepbackends.bench.tables import markdown, ratio_text, seconds_text

from .conftest import measured, result_of

BASE = Row(PLAIN_COPY, "suspend_dirty", 16, 32, 256, 0, 0.32)


def rows_of(*values: tuple[str, str, float]) -> list[Row]:
    return [dataclasses.replace(BASE, peer=p, case=c, seconds=s) for p, c, s in values]


def test_tables_hold_medians_shares_and_ratios() -> None:
    rows = rows_of(
        (PLAIN_COPY, "suspend_dirty", 0.32),
        (PLAIN_COPY, "resume", 0.16),
        *((OURS, "suspend_dirty", seconds) for seconds in (9.0, 0.4, 0.1)),
        (OURS, "suspend_clean", 0.02),
        (OURS, "resume", 0.2),
        (OURS, "discard_kv", 0.01),
        ("vllm", "suspend_dirty", 0.5),
        ("vllm", "discard_kv", 0.02),
    )
    zeroed = dataclasses.replace(rows[-1], peer=OURS, case="resume_kv", fill="zero")
    small = [dataclasses.replace(r, tensor_mib=1, seconds=0.5) for r in rows if r.peer == OURS]
    text = markdown(result_of(*rows, zeroed, *small))
    assert "50.0 GiB/s down, 100.0 GiB/s up" in text
    lines = text.splitlines()
    assert "|  | sleepbackends, s | share of the link | vllm, s (ratio) |" in lines
    assert "| suspend_dirty | 0.400 | 80.0% | 0.500 (1.25x) |" in lines
    assert "| suspend_clean | 0.0200 |  |  |" in lines
    assert "| resume | 0.200 | 80.0% |  |" in lines
    assert "| discard_kv | 0.0100 |  | 0.0200 (2.00x) |" in lines
    assert "| resume_kv, zero-filled | 0.0200 |  |  |" in lines
    assert "| 1 against 256 MiB | 1.25x | 2.50x |" in lines


def test_without_ours_the_peers_have_no_ratio() -> None:
    rows = rows_of(("vllm", "resume", 0.5))
    assert "| resume |  |  | 0.500 |" in markdown(result_of(*rows)).splitlines()


def test_every_workload_has_a_table_with_its_own_link() -> None:
    rows = [row for spec in Request((4, 16), tensor_mib=(256,)).specs() for row in measured(spec)]
    slow = [
        dataclasses.replace(row, seconds=row.seconds * 2)
        if (row.peer, row.weights_gib) == (PLAIN_COPY, 4)
        else row
        for row in rows
    ]
    text = markdown(result_of(*slow))
    assert text.count("### 4 GiB of weights and 32 GiB of KV cache, tensors of 256 MiB\n") == 1
    assert text.count("### 16 GiB of weights and") == 1
    in_turn = text.split("### 16 GiB of weights each, in one process and in turn\n")[1]
    assert "suspend_clean |" in in_turn.split("###")[0]
    assert "### 32 GiB of KV cache each, in one process and in turn\n" in text
    shares = [line.split(" | ")[2] for line in text.splitlines() if "| suspend_dirty |" in line]
    assert shares == ["187.5%", "93.8%"]


def test_two_devices() -> None:
    rows = [row for spec in Request((4, 16), devices=2).specs() for row in measured(spec)]
    lines = markdown(result_of(*rows)).splitlines()
    assert f"| {OURS} resume, 16 GiB on each | 0.320 | 0.320 | 2.00x |" in lines
    assert f"| {PLAIN_COPY} resume, 4 GiB on each | 0.0750 | 0.0750 | 2.00x |" in lines


def test_what_was_not_measured_is_said() -> None:
    text = markdown(result_of(skipped={"vllm": "is not there"}))
    assert text.endswith("Not measured, or not to the end:\n\n- vllm: is not there\n")


def test_figures_as_text() -> None:
    assert [seconds_text(value) for value in (None, 12.34567, 0.1, 0.0123456)] == [
        *("", "12.346", "0.100", "0.0123")
    ]
    assert [ratio_text(*pair) for pair in ((1, 2), (None, 2), (1, None), (1, 0))] == [
        *("0.50x", "", "", "")
    ]
