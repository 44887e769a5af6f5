"""One HTML page made of a result: charts, a table under each, and what was measured with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any
from xml.etree.ElementTree import Element, SubElement

from sleepbackends.bench.charts import Bar, Group, Line, bar_chart, line_chart
from sleepbackends.bench.rows import (
    BOTH_DEVICES,
    CASES,
    DOWN,
    MEANINGS,
    OURS,
    PEERS,
    PLAIN_COPY,
    UP,
    Row,
    Workload,
    chosen,
    link_rates,
    median_of,
    share_of_link,
    two_devices,
    workloads,
)
from sleepbackends.bench.tables import ratio_text, seconds_text, workload_title
from sleepbackends.pages.parts import Cells, Page, add_section, add_table

_LABELS = {PLAIN_COPY: "plain copy", "tms_retain": "tms, retained"}


def page(result: Mapping[str, Any]) -> str:
    """Return a page that can be read on its own, from what was written to the JSON file."""
    rows = [Row(**row) for row in result["rows"]]
    machine = result["machine"]
    report = Page("Suspend and resume, measured", _lead(machine, rows))
    main = report.main
    if any(row.devices == BOTH_DEVICES for row in rows):
        _two_devices(main, rows)
    else:
        _against_bytes(main, rows)
        for number, (workload, of_it) in enumerate(workloads(rows)):
            _workload(main, f"workload-{number}", workload, of_it, rows)
    _cases(main, rows)
    add_table(add_section(main, "Machine and versions"), [("", ""), *_facts(machine)], "facts")
    if result.get("skipped"):
        section = add_section(main, "Not measured, or not to the end")
        add_table(section, [("what", "why"), *result["skipped"].items()], "facts")
    return report.text()


def _lead(machine: Mapping[str, Any], rows: Sequence[Row]) -> str:
    text = f"{machine.get('gpu', 'unknown device')}, {machine.get('date', 'date unknown')}."
    link = link_rates(rows)
    if link:
        rates = " and ".join(f"{rate:.1f} GiB/s {way.split('_')[0]}" for way, rate in link.items())
        text += f" Plain copies from and to pinned memory, in the same run: {rates}."
    return text + " Medians of the rounds; shorter is better."


# One workload


def _workload(
    main: Element, name: str, workload: Workload, rows: Sequence[Row], all_rows: Sequence[Row]
) -> None:
    title = workload_title(workload)
    section = add_section(main, title[0].upper() + title[1:])
    plain = chosen(all_rows, peer=PLAIN_COPY, weights_gib=workload.weights_gib)
    groups = []
    head = ("case", "allocator", "median s", "times ours", "least s", "most s", "rows")
    cells: list[Sequence[str]] = [head]
    for case in CASES:
        bars = []
        ours = median_of(rows, peer=OURS, case=case, fill="none")
        for label, kind, same in _series(case, rows, plain):
            seconds = median(row.seconds for row in same)
            ratio = ratio_text(seconds, ours) if kind != OURS else ""
            text = f"{seconds_text(seconds)} s" + (f"  ({ratio})" if ratio else "")
            bars.append(Bar(label, seconds, text, kind))
            spread = [seconds_text(pick(row.seconds for row in same)) for pick in (min, max)]
            cells.append((case, label, seconds_text(seconds), ratio, *spread, str(len(same))))
        if bars:
            groups.append(Group(case, bars))
    description = f"Bars of seconds for each case and allocator. {title}."
    _figure(
        section,
        bar_chart(f"{name}-seconds", "Seconds", description, groups),
        "Seconds, in parentheses how many times ours. Each case has a scale of its own. A plain "
        "copy moves all of the weights.",
        cells,
    )
    _shares(section, name, workload, rows, all_rows)


def _series(
    case: str, rows: Sequence[Row], plain: Sequence[Row]
) -> Iterator[tuple[str, str, list[Row]]]:
    """List what is compared in a case: label, kind, rows."""
    for peer in (OURS, *PEERS):
        if same := chosen(rows, peer=peer, case=case, fill="none"):
            yield _LABELS.get(peer, peer), peer, same
        same = chosen(rows, peer=peer, case=case, fill="zero")
        if same and case.startswith("resume"):
            yield "ours, zero-filled", peer, same
    same = chosen(plain, case="resume" if case in UP else "suspend_dirty")
    if same and case in (*DOWN, *UP) and chosen(rows, case=case):
        yield _LABELS[PLAIN_COPY], PLAIN_COPY, same


def _shares(
    section: Element, name: str, workload: Workload, rows: Sequence[Row], all_rows: Sequence[Row]
) -> None:
    groups, cells = [], [("case", "allocator", "share of the link")]
    for case in CASES:
        bars = []
        for peer in (OURS, *PEERS):
            seconds = median_of(rows, peer=peer, case=case, fill="none")
            share = share_of_link(all_rows, workload, case, seconds)
            if share is not None:
                label = _LABELS.get(peer, peer)
                bars.append(Bar(label, share, f"{share:.1%}", peer))
                cells.append((case, label, f"{share:.1%}"))
        if bars:
            groups.append(Group(case, bars, full=1.0))
    if groups:
        description = "Bars of the share of the link's rate at which the weights moved."
        _figure(
            section,
            bar_chart(f"{name}-link", "Share of the link", description, groups),
            "Share of the link's rate at which the weights moved; the line is 100 %. Longer is "
            "better here.",
            cells,
        )


# Several workloads


def _against_bytes(main: Element, rows: Sequence[Row]) -> None:
    ours_and_peers = [row for row in rows if row.peer != PLAIN_COPY and row.tensor_mib]
    for size in sorted({row.tensor_mib for row in ours_and_peers}, reverse=True):
        of_size = chosen(ours_and_peers, tensor_mib=size, fill="none")
        if len({row.weights_gib for row in of_size}) < 2:
            continue
        section = add_section(main, f"Time against bytes, tensors of {size:g} MiB")
        for case in (*DOWN, *UP):
            lines = list(_lines(case, of_size, rows))
            if not lines:
                continue
            amounts = sorted({x for line in lines for x, _ in line.points})
            cells: list[Sequence[str]] = [
                ("allocator, s", *(f"{amount:g} GiB" for amount in amounts))
            ]
            for line in lines:
                known = dict(line.points)
                cells.append((line.label, *(seconds_text(known.get(x)) for x in amounts)))
            description = f"Lines of seconds against the weights in GiB, of each allocator: {case}."
            name = f"bytes-{size:g}-{case}".replace(".", "-")
            axes = ("GiB of weights", "seconds")
            caption = f"{case}: {MEANINGS[case]}."
            _figure(section, line_chart(name, case, description, lines, axes), caption, cells)


def _lines(case: str, of_size: Sequence[Row], rows: Sequence[Row]) -> Iterator[Line]:
    plain = chosen(rows, peer=PLAIN_COPY, case="resume" if case in UP else "suspend_dirty")
    for peer in (OURS, *PEERS, PLAIN_COPY):
        same = plain if peer == PLAIN_COPY else chosen(of_size, peer=peer, case=case)
        if not chosen(of_size, case=case):
            return
        amounts = sorted({row.weights_gib for row in same})
        points = [(x, median_of(same, weights_gib=x) or 0.0) for x in amounts]
        if points:
            yield Line(_LABELS.get(peer, peer), points, peer)


def _two_devices(main: Element, rows: Sequence[Row]) -> None:
    section = add_section(main, "Two devices")
    groups = []
    cells = [("what", "one device, s", "both at once, s", "aggregate of both links")]
    for row, one, both in two_devices(rows):
        name = f"{_LABELS.get(row.peer, row.peer)} {row.case}, {row.weights_gib:g} GiB on each"
        ratio = ratio_text(2 * one, both)
        bars = [
            Bar("one device", one, f"{seconds_text(one)} s", row.peer),
            Bar("both at once", both, f"{seconds_text(both)} s  ({ratio})", row.peer),
        ]
        groups.append(Group(name, bars))
        cells.append((name, seconds_text(one), seconds_text(both), ratio))
    description = "Bars of seconds of one device alone and of two at once."
    _figure(
        section,
        bar_chart("two-devices", "Two devices", description, groups),
        "Seconds, in parentheses the rate of both links against that of one.",
        cells,
    )


# Parts of the page


def _cases(main: Element, rows: Sequence[Row]) -> None:
    measured = {row.case for row in rows}
    meanings = [(case, MEANINGS[case]) for case in CASES if case in measured]
    if meanings:
        add_table(add_section(main, "Cases"), [("case", "what is measured"), *meanings], "facts")


def _facts(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), str(value)) for name, value in machine.items()]


def _figure(section: Element, chart: Element, caption: str, cells: Cells) -> None:
    figure = SubElement(section, "figure")
    SubElement(figure, "figcaption").text = caption
    SubElement(figure, "div", {"class": "scroll", "tabindex": "0"}).append(chart)
    details = SubElement(figure, "details")
    SubElement(details, "summary").text = "The figures as a table"
    add_table(details, cells, "numbers")
