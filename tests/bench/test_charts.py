from __future__ import annotations

from itertools import pairwise
from xml.etree.ElementTree import Element

import pytest

from sleepbackends.bench.charts import (
    WIDTH,
    Bar,
    Group,
    Line,
    apart,
    bar_chart,
    kind_class,
    line_chart,
    ticks,
)


def bars_of(*groups: Group) -> Element:
    return bar_chart("c", "Seconds", "Bars.", groups)


def widths(chart: Element) -> list[float]:
    return [float(rect.attrib["width"]) for rect in chart.iter("rect")]


def texts(chart: Element) -> list[str]:
    return [text.text or "" for text in chart.iter("text")]


def places(chart: Element, what: str) -> list[tuple[float, float]]:
    names = {"circle": ("cx", "cy"), "text": ("x", "y")}[what]
    return [tuple(float(e.attrib[name]) for name in names) for e in chart.iter(what)]  # type: ignore[misc]


def test_bars_are_as_long_as_their_values_say() -> None:
    bars = [Bar("a", 4.0, "4 s", "vllm"), Bar("b", 1.0, "1 s", "sleepbackends")]
    chart = bars_of(Group("case", bars), Group("other", [Bar("a", 0.002, "2 ms", "vllm")]))
    first, second, alone = widths(chart)
    assert first == pytest.approx(4 * second, rel=0.01)
    assert first == alone
    assert texts(chart) == ["case", "a", "4 s", "b", "1 s", "other", "a", "2 ms"]
    assert [title.text for title in chart.iter("title")][1:] == [
        *("case, a: 4 s", "case, b: 1 s", "other, a: 2 ms")
    ]


def test_bars_of_a_share_end_at_a_line() -> None:
    whole = widths(bars_of(Group("x", [Bar("a", 1.0, "", "tms")])))[0]
    chart = bars_of(Group("x", [Bar("a", 0.5, "", "tms"), Bar("b", 1.2, "", "tms")], full=1.0))
    assert widths(chart) == [pytest.approx(whole / 2), whole]
    (limit,) = [line for line in chart.iter("line") if line.attrib["class"] == "limit"]
    beyond = max(float(box.attrib["x"]) + float(box.attrib["width"]) for box in chart.iter("rect"))
    assert float(limit.attrib["x1"]) == beyond


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0]])
def test_bars_of_nothing(values: list[float]) -> None:
    chart = bars_of(Group("x", [Bar("a", value, "", "tms") for value in values]))
    assert len(widths(chart)) == len(values)


def test_everything_drawn_is_inside() -> None:
    bars = [Bar("a", value, "x", "tms") for value in (5, 3, 1)]
    lines = [Line(str(i), [(1, i), (64, 7.3 * i)], "tms") for i in range(5)]
    for chart in (bars_of(Group("g", bars)), line_chart("l", "t", "d", lines, ("x", "y"))):
        _, _, width, height = map(float, chart.attrib["viewBox"].split())
        assert width == WIDTH
        assert all(0 <= x < width and 0 <= y < height for x, y in places(chart, "text"))


def test_lines_go_through_their_points_from_zero() -> None:
    lines = [Line("ours", [(4, 1), (16, 4)], "sleepbackends"), Line("x", [(8, 8)], "vllm")]
    chart = line_chart("l", "Time", "Lines.", lines, ("GiB", "s"))
    (x1, y1), (x2, y2), (x3, y3) = places(chart, "circle")
    assert (x1 + x2) / 2 < x3 or x3 > x1
    left, bottom = x1 - (x2 - x1) / 3, y1 + (y1 - y2) / 3
    assert x3 - left == pytest.approx((x2 - left) / 2, abs=0.5)
    assert bottom - y3 == pytest.approx(2 * (bottom - y2), abs=0.5)
    axis = next(line for line in chart.iter("line") if line.attrib["class"] == "axis")
    assert float(axis.attrib["y1"]) == pytest.approx(bottom, abs=0.5)
    assert float(axis.attrib["x1"]) == pytest.approx(left, abs=0.5)
    assert {"ours", "x", "GiB", "s", "0"} < set(texts(chart))
    assert "ours: 4 at 16" in [title.text for title in chart.iter("title")]


@pytest.mark.parametrize("largest", [0.0123, 0.9, 1.0, 7.0, 16.0, 64.0, 99.0, 1234.5])
def test_ticks_are_few_and_round_and_reach_the_largest(largest: float) -> None:
    found = ticks(largest)
    assert found[0] == 0
    assert 4 <= len(found) <= 7
    assert found[-1] >= largest * 0.999 > found[-2] * 0.999
    assert all(len(f"{value:g}") <= 6 for value in found)


def test_ticks_of_nothing() -> None:
    assert ticks(0.0) == [0.0, 1.0]


def test_labels_are_moved_apart_in_their_order() -> None:
    given = [10.0, 100.0, 11.0, 12.0, 10.5]
    moved = apart(given, 16)
    order = sorted(range(5), key=given.__getitem__)
    assert all(moved[b] - moved[a] >= 15.99 for a, b in pairwise(order))
    assert moved[1] == 100
    assert sum(moved) == pytest.approx(sum(given)), "none is moved further than it must be"
    assert apart([], 16) == []


def test_kinds_become_classes() -> None:
    assert kind_class("tms_retain") == "kind-tms-retain"
    assert kind_class('x" onload="y') == "kind-x-onload-y"
