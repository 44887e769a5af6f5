"""Charts as inline SVG: bars in groups, and lines. Colours come from the page's style sheet."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement

WIDTH = 720
_LABELS = 176
"""Where bars begin: their labels are to the left."""
_VALUES = 132
"""Room for the text to the right of the longest bar."""
_ROW, _BAR = 24, 14
_TICKS = 5


@dataclass(frozen=True)
class Bar:
    """One bar.

    Parameters
    ----------
    label : str
        What it stands for.
    value : float
        How long it is, in the unit of its group.
    text : str
        What is written after it.
    kind : str
        Whose it is; names its colour.
    """

    label: str
    value: float
    text: str
    kind: str


@dataclass(frozen=True)
class Group:
    """Bars that are compared with each other.

    Parameters
    ----------
    title : str
        What they have in common.
    bars : sequence of Bar
        From top to bottom.
    full : float, optional
        The value as long as the chart is wide; by default that of the longest bar.
    """

    title: str
    bars: Sequence[Bar]
    full: float | None = None


@dataclass(frozen=True)
class Line:
    """Points that are joined.

    Parameters
    ----------
    label : str
        What they stand for.
    points : sequence of (float, float)
        In order of the first.
    kind : str
        Whose they are; names their colour.
    """

    label: str
    points: Sequence[tuple[float, float]]
    kind: str


def bar_chart(name: str, title: str, description: str, groups: Sequence[Group]) -> Element:
    """Draw bars one under the other, each group to a scale of its own that begins at zero.

    Parameters
    ----------
    name : str
        Tells it from other charts of the page.
    title, description : str
        For those who do not see it.
    groups : sequence of Group
        From top to bottom.
    """
    height = sum(34 + _ROW * len(group.bars) for group in groups)
    svg = _svg(name, title, description, height)
    room = WIDTH - _LABELS - _VALUES
    top = 0.0
    for group in groups:
        _text(svg, 0, top + 18, group.title, "title")
        top += 30
        full = group.full or max((bar.value for bar in group.bars), default=0.0) or 1.0
        bottom = top + _ROW * len(group.bars) - (_ROW - _BAR)
        _line(svg, _LABELS, top - 3, _LABELS, bottom + 3, "axis")
        if group.full:
            _line(svg, _LABELS + room, top - 3, _LABELS + room, bottom + 3, "limit")
        for bar in group.bars:
            part = SubElement(svg, "g", {"class": kind_class(bar.kind)})
            SubElement(part, "title").text = f"{group.title}, {bar.label}: {bar.text}"
            length = max(1.0, room * min(1.0, bar.value / full))
            _text(part, _LABELS - 10, top + 11, bar.label, "label end")
            box = {"x": _LABELS, "y": top, "width": length, "height": _BAR, "rx": 2}
            SubElement(part, "rect", {key: _number(value) for key, value in box.items()})
            # Not across the line where there is one.
            text_at = _LABELS + (room if group.full else length) + 8
            _text(part, text_at, top + 11, bar.text, "value")
            top += _ROW
        top += 4
    return svg


def line_chart(
    name: str, title: str, description: str, lines: Sequence[Line], axes: tuple[str, str]
) -> Element:
    """Draw lines from zero on both axes, each with its label at its end.

    Parameters
    ----------
    name, title, description
        As for ``bar_chart``.
    lines : sequence of Line
        At least one, with at least one point.
    axes : tuple of str
        What is along the first axis, and along the second.
    """
    height, left, right, above, below = 300, 56, 150, 28, 46
    svg = _svg(name, title, description, height)
    bottom, end = height - below, WIDTH - right
    furthest = max(x for line in lines for x, _ in line.points) or 1.0
    x_ticks = [value for value in ticks(furthest) if value <= furthest]
    y_ticks = ticks(max(y for line in lines for _, y in line.points))

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (end - left) * x / furthest,
            bottom - (bottom - above) * y / y_ticks[-1],
        )

    for value in y_ticks:
        _, y = at(0, value)
        _line(svg, left, y, end, y, "grid" if value else "axis")
        _text(svg, left - 8, y + 4, f"{value:g}", "tick end")
    for value in x_ticks:
        x, _ = at(value, 0)
        _text(svg, x, bottom + 18, f"{value:g}", "tick middle")
    _text(svg, (left + end) / 2, bottom + 38, axes[0], "tick middle")
    _text(svg, 0, 14, axes[1], "tick")
    ends = [at(*line.points[-1]) for line in lines]
    for line, (x, y), label_y in zip(lines, ends, apart([y for _, y in ends], 16), strict=True):
        part = SubElement(svg, "g", {"class": kind_class(line.kind)})
        SubElement(part, "title").text = line.label
        places = [at(*point) for point in line.points]
        path = " ".join(f"{_number(px)},{_number(py)}" for px, py in places)
        SubElement(part, "polyline", {"points": path})
        for (px, py), (first, second) in zip(places, line.points, strict=True):
            dot = SubElement(part, "circle", {"cx": _number(px), "cy": _number(py), "r": "3.5"})
            SubElement(dot, "title").text = f"{line.label}: {second:g} at {first:g}"
        if abs(label_y - y) > 2:
            _line(part, x + 6, y, x + 14, label_y, "lead")
        _text(part, x + 18, label_y + 4, line.label, "label")
    return svg


def ticks(largest: float) -> list[float]:
    """Return round values from zero to the largest or a little more, about five of them."""
    if largest <= 0:
        return [0.0, 1.0]
    rough = largest / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    return [step * number for number in range(math.ceil(largest / step * 0.999) + 1)]


def apart(places: Sequence[float], least: float) -> list[float]:
    """Move places as little as possible so that no two are closer than so much, in their order."""
    order = sorted(range(len(places)), key=places.__getitem__)
    # Places less their number times the least distance have to rise: those that fall are joined.
    joined: list[tuple[float, int]] = []
    for number, index in enumerate(order):
        mean, count = places[index] - number * least, 1
        while joined and joined[-1][0] > mean:
            before, members = joined.pop()
            mean = (mean * count + before * members) / (count + members)
            count += members
        joined.append((mean, count))
    levels = [mean for mean, count in joined for _ in range(count)]
    moved = {index: levels[number] + number * least for number, index in enumerate(order)}
    return [moved[index] for index in range(len(places))]


def kind_class(kind: str) -> str:
    """Return the class of the style sheet that gives a kind its colour."""
    return "kind-" + re.sub(r"\W+|_", "-", kind)


def _svg(name: str, title: str, description: str, height: float) -> Element:
    names = {"role": "img", "aria-labelledby": f"{name}-title {name}-description"}
    svg = Element("svg", {"viewBox": f"0 0 {WIDTH} {_number(height)}", **names})
    SubElement(svg, "title", {"id": f"{name}-title"}).text = title
    SubElement(svg, "desc", {"id": f"{name}-description"}).text = description
    return svg


def _text(parent: Element, x: float, y: float, text: str, classes: str) -> None:
    place = {"x": _number(x), "y": _number(y), "class": classes}
    SubElement(parent, "text", place).text = text


def _line(parent: Element, x1: float, y1: float, x2: float, y2: float, name: str) -> None:
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    SubElement(parent, "line", {**{k: _number(v) for k, v in ends.items()}, "class": name})


def _number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
