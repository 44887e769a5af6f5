"""The Markdown of a run of ``benchmarks.scale``, and what limits it, by what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks import ranks as coordination
from benchmarks.scaling.cases import (
    CASES,
    PLAIN_ALONE,
    PLAIN_AT_ONCE,
    expected,
    is_fault,
)
from benchmarks.scaling.spec import GIB, LAYOUTS, Row

PLAIN = {
    "copy_down": "plain copies down",
    "copy_up": "plain copies up",
    "touch": "first touch",
    "register": "registration",
    "map": "mapping of device memory",
    "unmap": "unmapping",
}
DRIVER = {
    "first": {"its registration by the driver": "register", "unmapping by the driver": "unmap"},
    "dirty": {"unmapping by the driver": "unmap"},
    "resume": {"mapping by the driver": "map"},
}
"""What the driver does for a transition, and the plain step that it is measured by. It lets
few in at a time: what all do at once is then not faster than what one does alone."""
WHOLE = {"first": "copy_down", "dirty": "copy_down", "resume": "copy_up"}
"""Cases in which all bytes of the weights cross the link, and the plain copy next to them."""


class Limit(NamedTuple):
    """One thing that a transition of many ranks needs.

    Parameters
    ----------
    name : str
        What it is.
    gib_s : float
        What was measured of it, for all ranks together.
    """

    name: str
    gib_s: float


class Figures:
    """The rows of a run, asked for by what they are.

    Parameters
    ----------
    rows : sequence of Row
        All of them.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def of(self, **wanted: object) -> list[Row]:
        """Return the rows with these values."""
        return [r for r in self.rows if all(getattr(r, k) == v for k, v in wanted.items())]

    def median(self, **wanted: object) -> Row | None:
        """Return the row in the middle of those with these values, by its seconds."""
        rows = sorted(self.of(**wanted), key=lambda row: row.seconds)
        return rows[len(rows) // 2] if rows else None

    def groups(self) -> list[tuple[str, str]]:
        """Return which backends were measured in which layouts."""
        return list(dict.fromkeys((row.backend, row.layout) for row in self.rows))

    def counts(self, **wanted: object) -> list[int]:
        """Return the numbers of ranks that were measured."""
        return sorted({row.ranks for row in self.of(**wanted)})

    def alone_gib_s(self, layout: str, ranks: int, step: str) -> float | None:
        """Add up what each rank does by itself."""
        rows = self.of(layout=layout, ranks=ranks, case=PLAIN_ALONE + step)
        each = [sum(row.size_bytes / GIB / seconds for seconds in row.rank_seconds) for row in rows]
        return median(each) if each else None

    def at_once_gib_s(self, layout: str, ranks: int, step: str) -> float | None:
        """Return what all ranks do at once."""
        row = self.median(layout=layout, ranks=ranks, case=PLAIN_AT_ONCE + step)
        return row.gib_s if row else None


def markdown(result: Mapping[str, Any]) -> str:
    """Make the tables of a run, from what was written to its JSON file."""
    figures = Figures([Row(**row) for row in result["rows"]])
    host_gib_s = result["host_copy_gib_s"]
    parts = [_machine(result)]
    for layout in dict.fromkeys(row.layout for row in figures.rows):
        parts += _plain(figures, layout)
    for backend, layout in figures.groups():
        parts.append(_transitions(figures, backend, layout))
    parts += _limits(figures, host_gib_s)
    parts += _faults(figures, result["timeout_s"])
    parts += _places(result["places"])
    if result["coordination"]:
        parts += ["### Coordination", coordination.markdown("simulated", result["coordination"])]
    if result["skipped"]:
        notes = (f"- {title}: {why}" for title, why in result["skipped"].items())
        parts.append("Not measured, or not to the end:\n\n" + "\n".join(notes))
    return "\n\n".join(parts) + "\n"


def has_failed(result: Mapping[str, Any]) -> bool:
    """Tell whether something was not measured to the end, or a failure left ranks different."""
    rows = [Row(**row) for row in result["rows"]]
    return bool(result["skipped"]) or not all(
        _is_kept(row, result["timeout_s"]) for row in rows if is_fault(row.case)
    )


def _is_kept(row: Row, timeout_s: float) -> bool:
    return row.outcome == expected(row.case) and row.seconds <= timeout_s


def _machine(result: Mapping[str, Any]) -> str:
    facts = ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in result["machine"].items()
    )
    rates = ", ".join(
        f"{name} {rate:.1f} GiB/s" for name, rate in result["host_copy_gib_s"].items()
    )
    return (
        f"Measured with {facts}.\n\n"
        f"Copied by the processors, each byte read and written once: {rates}."
    )


def _plain(figures: Figures, layout: str) -> list[str]:
    lines = []
    for step, name in PLAIN.items():
        for ranks in figures.counts(layout=layout, case=PLAIN_ALONE + step):
            alone = figures.alone_gib_s(layout, ranks, step)
            at_once = figures.at_once_gib_s(layout, ranks, step)
            if alone and at_once:
                cells = [name, ranks, f"{alone:.1f}", f"{at_once:.1f}", f"{at_once / alone:.0%}"]
                lines.append(_line(cells))
    if not lines:
        return []
    head = ["", "ranks", "each alone, added up, GiB/s", "all at once, GiB/s", "share"]
    return [f"### Plain steps: {LAYOUTS[layout]}", _table(head, lines)]


def _transitions(figures: Figures, backend: str, layout: str) -> str:
    lines = []
    for case, meaning in CASES.items():
        for ranks in figures.counts(backend=backend, layout=layout, case=case):
            row = figures.median(backend=backend, layout=layout, ranks=ranks, case=case)
            if row is not None:
                lines.append(_line([meaning, ranks, *_cells(figures, row)]))
    head = [
        "",
        "ranks",
        "all, s",
        "each rank, s",
        "GiB/s in all",
        "times one",
        "share of the links",
    ]
    return f"### {backend}: {LAYOUTS[layout]}\n\n{_table(head, lines)}"


def _cells(figures: Figures, row: Row) -> list[str]:
    each = (
        [seconds_text(s) for s in (min(row.rank_seconds), max(row.rank_seconds))]
        if row.rank_seconds
        else []
    )
    cells = [seconds_text(row.seconds), " to ".join(dict.fromkeys(each))]
    if row.case not in WHOLE:
        return [*cells, "", "", ""]
    one = figures.median(backend=row.backend, layout=row.layout, ranks=1, case=row.case)
    times_one = f"{row.gib_s / one.gib_s:.2f}" if one else ""
    links = figures.alone_gib_s(row.layout, row.ranks, WHOLE[row.case])
    share = f"{row.gib_s / links:.0%}" if links else ""
    return [*cells, f"{row.gib_s:.1f}", times_one, share]


def limits(figures: Figures, row: Row, host_gib_s: Mapping[str, float]) -> list[Limit]:
    """List what a transition needs, the scarcest first."""
    copy = WHOLE[row.case]
    found = {
        "the links": figures.alone_gib_s(row.layout, row.ranks, copy),
        "the links, used at once": figures.at_once_gib_s(row.layout, row.ranks, copy),
    }
    if row.case == "first":
        found["first touch of host memory"] = figures.at_once_gib_s(row.layout, row.ranks, "touch")
    for name, step in DRIVER[row.case].items():
        found[name] = figures.at_once_gib_s(row.layout, row.ranks, step)
    # What a device copies is read or written in host memory, not both.
    host = 2 * host_gib_s["all"] if "all" in host_gib_s else 2 * max(host_gib_s.values(), default=0)
    if host > (found["the links, used at once"] or 0):
        found["host memory, as processors use it"] = host
    known = [Limit(name, rate) for name, rate in found.items() if rate]
    return sorted(known, key=lambda limit: limit.gib_s)


def _limits(figures: Figures, host_gib_s: Mapping[str, float]) -> list[str]:
    lines = []
    for backend, layout in figures.groups():
        for case in WHOLE:
            for ranks in figures.counts(backend=backend, layout=layout, case=case):
                row = figures.median(backend=backend, layout=layout, ranks=ranks, case=case)
                if row is None or not (needs := limits(figures, row, host_gib_s)):
                    continue
                least = needs[0]
                cells = [f"{backend}, {layout}", case, ranks, f"{row.gib_s:.1f}", least.name]
                cells += [f"{least.gib_s:.1f}", f"{row.gib_s / least.gib_s:.0%}"]
                lines.append(_line(cells))
    if not lines:
        return []
    head = ["", "case", "ranks", "reached, GiB/s", "scarcest of what it needs", "GiB/s", "reached"]
    return ["### What limits it", _table(head, lines)]


def _faults(figures: Figures, timeout_s: float) -> list[str]:
    lines = []
    for row in figures.rows:
        if is_fault(row.case):
            kept = "yes" if _is_kept(row, timeout_s) else "NO"
            where = f"{row.backend}, {row.layout}"
            lines.append(
                _line([where, row.ranks, row.case, row.outcome, seconds_text(row.seconds), kept])
            )
    if not lines:
        return []
    head = ["", "ranks", "what failed on the last rank", "after it", "s", "as promised, in time"]
    return [f"### One rank fails, deadline {timeout_s:g} s", _table(head, lines)]


def _places(places: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[str]:
    lines = []
    for title, ranks in places.items():
        for rank in ranks:
            arena = ", ".join(f"{node}: {size:.2f} GiB" for node, size in rank["arena_gib"].items())
            node = rank.get("gpu_node")
            cells = [title, rank["rank"], rank.get("gpu", ""), "" if node is None else node]
            lines.append(_line([*cells, arena or "not known"]))
    if not lines:
        return []
    head = ["", "rank", "GPU", "its NUMA node", "where the saved bytes lie"]
    return ["### Places", _table(head, lines)]


def seconds_text(seconds: float) -> str:
    """Format seconds with three digits or more."""
    return f"{seconds:.3f}" if seconds >= 0.1 else f"{seconds:.4f}"


def _table(head: Sequence[str], lines: Sequence[str]) -> str:
    return "\n".join([_line(head), "|---" * len(head) + "|", *lines])


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
