"""The Markdown made of a result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sleepbackends.bench.rows import (
    BOTH_DEVICES,
    CASES,
    OURS,
    PEERS,
    Row,
    Workload,
    link_rates,
    median_of,
    share_of_link,
    two_devices,
    workloads,
)


def markdown(result: Mapping[str, Any]) -> str:
    """Make the tables of one run, from what was written to its JSON file."""
    rows = [Row(**row) for row in result["rows"]]
    parts = [machine_text(result["machine"], link_rates(rows))]
    if any(row.devices == BOTH_DEVICES for row in rows):
        parts.append(_two_devices(rows))
    else:
        parts += [_workload(workload, of_it, rows) for workload, of_it in workloads(rows)]
        parts.append(_sizes(rows))
    if result.get("skipped"):
        notes = (f"- {name}: {why}" for name, why in result["skipped"].items())
        parts.append("Not measured, or not to the end:\n\n" + "\n".join(notes))
    return "\n\n".join(part for part in parts if part) + "\n"


def machine_text(machine: Mapping[str, Any], link: Mapping[str, float]) -> str:
    """Say in a sentence or two what the figures were measured with."""
    facts = [f"{name.replace('_', ' ')} {value}" for name, value in machine.items()]
    text = "Measured with " + ", ".join(facts) + "."
    if link:
        rates = (f"{rate:.1f} GiB/s {name.split('_')[0]}" for name, rate in link.items())
        text += " The link, by plain pinned copies in the same run: " + ", ".join(rates) + "."
    return text


def workload_title(workload: Workload) -> str:
    """Say what was in memory."""
    if not workload.tensor_mib:
        amounts = {"weights": workload.weights_gib, "KV cache": workload.kv_gib}
        some = ", ".join(f"{gib:g} GiB of {name}" for name, gib in amounts.items() if gib)
        return f"{some} each, in one process and in turn"
    return (
        f"{workload.weights_gib:g} GiB of weights and {workload.kv_gib:g} GiB of KV cache, "
        f"tensors of {workload.tensor_mib:g} MiB"
    )


def _workload(workload: Workload, rows: Sequence[Row], all_rows: Sequence[Row]) -> str:
    peers = [peer for peer in PEERS if any(row.peer == peer for row in rows)]
    head = ["", f"{OURS}, s", "share of the link", *(f"{peer}, s (ratio)" for peer in peers)]
    lines = [f"### {workload_title(workload)}", "", _line(head), _line(["---"] * len(head))]
    measured = {row.case for row in rows}
    for fill in ("none", "zero"):
        for case in filter(measured.__contains__, CASES):
            ours = median_of(rows, peer=OURS, case=case, fill=fill)
            if fill != "none" and (ours is None or not case.startswith("resume")):
                continue
            share = share_of_link(all_rows, workload, case, ours)
            cells = [case if fill == "none" else f"{case}, zero-filled", seconds_text(ours)]
            cells.append("" if share is None else f"{share:.1%}")
            cells += [_against(median_of(rows, peer=peer, case=case), ours) for peer in peers]
            lines.append(_line(cells))
    return "\n".join(lines)


def _sizes(rows: Sequence[Row]) -> str:
    """Compare tensor sizes: what smaller tensors cost, in ratios to the largest."""
    ours = [r for r in rows if (r.peer, r.fill, r.devices) == (OURS, "none", "0")]
    groups: dict[tuple[float, float], set[float]] = defaultdict(set)
    for row in ours:
        if row.tensor_mib:
            groups[row.weights_gib, row.kv_gib].add(row.tensor_mib)
    lines = []
    for (weights_gib, kv_gib), sizes in groups.items():
        largest = max(sizes)
        of_group = [r for r in ours if (r.weights_gib, r.kv_gib) == (weights_gib, kv_gib)]
        for size in sorted(sizes - {largest}, reverse=True):
            cells = [f"{size:g} against {largest:g} MiB"]
            for case in ("suspend_dirty", "resume"):
                small = median_of(of_group, case=case, tensor_mib=size)
                large = median_of(of_group, case=case, tensor_mib=largest)
                cells.append(ratio_text(small, large))
            lines.append(_line(cells))
    if not lines:
        return ""
    head = [_line(["tensors", "suspend_dirty", "resume"]), _line(["---"] * 3)]
    return "\n".join(["### What smaller tensors cost", "", *head, *lines])


def _two_devices(rows: Sequence[Row]) -> str:
    lines = []
    for row, one, both in two_devices(rows):
        name = f"{row.peer} {row.case}, {row.weights_gib:g} GiB on each"
        ratio = ratio_text(2 * one, both)
        lines.append(_line([name, seconds_text(one), seconds_text(both), ratio]))
    if not lines:
        return ""
    head = ["", "one device, s", "both at once, s", "aggregate of both links"]
    table = [_line(head), _line(["---"] * len(head)), *lines]
    return "\n".join(["### Two devices", "", *table])


def seconds_text(seconds: float | None) -> str:
    """Format seconds with three digits or more; nothing for None."""
    return "" if seconds is None else f"{seconds:.3f}" if seconds >= 0.1 else f"{seconds:.4f}"


def _against(peer: float | None, ours: float | None) -> str:
    if peer is None:
        return ""
    return (
        seconds_text(peer) if ours is None else f"{seconds_text(peer)} ({ratio_text(peer, ours)})"
    )


def ratio_text(numerator: float | None, denominator: float | None) -> str:
    """Format how many times the second the first is; nothing where that is not known."""
    if numerator is None or not denominator:
        return ""
    return f"{numerator / denominator:.2f}x"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
