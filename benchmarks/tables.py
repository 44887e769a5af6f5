"""Rows of measurements, and the Markdown made of them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

OURS = "sleepbackends"
PLAIN_COPY = "plain_copy"
PEERS = ("vllm", "tms", "tms_retain")

IN_TURN = "in_turn"
"""Ours and torch_memory_saver in one process, with a KV cache each and no weights."""

DOWN = ("suspend_first", "suspend_dirty")
UP = ("resume",)
CASES = (*DOWN, *UP, "discard_kv", "resume_kv")

BOTH_DEVICES = "0+1"


@dataclass(frozen=True)
class Row:
    """One measurement.

    Parameters
    ----------
    peer : str
        ``sleepbackends``, ``vllm``, ``tms``, ``tms_retain`` or ``plain_copy``.
    case : str
        One of ``CASES``. A plain copy to the host counts as ``suspend_dirty`` and one from
        the host as ``resume``.
    weights_gib, kv_gib : float
        How much memory there was of either kind, on each device.
    tensor_mib : float
        The size of the weight tensors.
    round : int
        Counted from 0.
    seconds : float
        How long it took.
    fill : str
        What discarded memory was filled with when it came back.
    devices : str
        Whose memory was moved: ``0``, ``1`` or ``0+1``.
    """

    peer: str
    case: str
    weights_gib: float
    kv_gib: float
    tensor_mib: float
    round: int
    seconds: float
    fill: str = "none"
    devices: str = "0"

    def to_json(self) -> dict[str, Any]:
        """Return what is kept of it in a file."""
        return dataclasses.asdict(self)


Emit = Callable[[Row], None]
"""Takes each row as soon as it is known."""


def median_of(rows: Iterable[Row], **wanted: object) -> float | None:
    """Return the median seconds of the rows with these values; None if there are none."""
    seconds = [
        row.seconds
        for row in rows
        if all(getattr(row, name) == value for name, value in wanted.items())
    ]
    return median(seconds) if seconds else None


def link_rates(rows: Sequence[Row]) -> dict[str, float]:
    """Return the rates of the plain copies of one device in GiB/s, by direction."""
    rates = {}
    for name, case in (("down_gib_s", "suspend_dirty"), ("up_gib_s", "resume")):
        plain = [r for r in rows if (r.peer, r.case, r.devices) == (PLAIN_COPY, case, "0")]
        if plain:
            rates[name] = median(row.weights_gib / row.seconds for row in plain)
    return rates


def markdown(result: Mapping[str, Any]) -> str:
    """Make the tables of one run, from what was written to its JSON file."""
    rows = [Row(**row) for row in result["rows"]]
    link = link_rates(rows)
    parts = [_machine(result["machine"], link)]
    if any(row.devices == BOTH_DEVICES for row in rows):
        parts.append(_two_devices(rows))
    else:
        workloads: dict[tuple[float, float, float], list[Row]] = defaultdict(list)
        for row in rows:
            if row.peer != PLAIN_COPY:
                workloads[row.weights_gib, row.kv_gib, -row.tensor_mib].append(row)
        parts += [_workload(of_it, link) for _, of_it in sorted(workloads.items())]
        parts.append(_sizes(rows))
    if result.get("skipped"):
        notes = (f"- {name}: {why}" for name, why in result["skipped"].items())
        parts.append("Not measured, or not to the end:\n\n" + "\n".join(notes))
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine(machine: Mapping[str, Any], link: Mapping[str, float]) -> str:
    facts = [f"{name.replace('_', ' ')} {value}" for name, value in machine.items()]
    text = "Measured with " + ", ".join(facts) + "."
    if link:
        rates = (f"{rate:.1f} GiB/s {name.split('_')[0]}" for name, rate in link.items())
        text += " The link, by plain pinned copies in the same run: " + ", ".join(rates) + "."
    return text


def _workload(rows: Sequence[Row], link: Mapping[str, float]) -> str:
    first = rows[0]
    peers = [peer for peer in PEERS if any(row.peer == peer for row in rows)]
    head = ["", f"{OURS}, s", "share of the link", *(f"{peer}, s (ratio)" for peer in peers)]
    title = f"{first.weights_gib:g} GiB of weights and {first.kv_gib:g} GiB of KV cache"
    title += f", tensors of {first.tensor_mib:g} MiB"
    if not first.weights_gib:
        title = f"{first.kv_gib:g} GiB of KV cache each, in one process and in turn"
    lines = [f"### {title}", ""]
    lines += [_line(head), _line(["---"] * len(head))]
    measured = {row.case for row in rows}
    for fill in ("none", "zero"):
        for case in filter(measured.__contains__, CASES):
            ours = median_of(rows, peer=OURS, case=case, fill=fill)
            if fill != "none" and (ours is None or not case.startswith("resume")):
                continue
            cells = [case if fill == "none" else f"{case}, zero-filled"]
            cells += [_seconds(ours), _share(first.weights_gib, case, ours, link)]
            cells += [_against(median_of(rows, peer=peer, case=case), ours) for peer in peers]
            lines.append(_line(cells))
    return "\n".join(lines)


def _share(weights_gib: float, case: str, seconds: float | None, link: Mapping[str, float]) -> str:
    rate = link.get("down_gib_s" if case in DOWN else "up_gib_s")
    if seconds is None or rate is None or case not in (*DOWN, *UP):
        return ""
    return f"{weights_gib / seconds / rate:.1%}"


def _sizes(rows: Sequence[Row]) -> str:
    """Compare tensor sizes: what smaller tensors cost, in ratios to the largest."""
    ours = [r for r in rows if (r.peer, r.fill, r.devices) == (OURS, "none", "0")]
    groups: dict[tuple[float, float], set[float]] = defaultdict(set)
    for row in ours:
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
                cells.append(_ratio(small, large))
            lines.append(_line(cells))
    if not lines:
        return ""
    head = [_line(["tensors", "suspend_dirty", "resume"]), _line(["---"] * 3)]
    return "\n".join(["### What smaller tensors cost", "", *head, *lines])


def _two_devices(rows: Sequence[Row]) -> str:
    lines = []
    for peer in (PLAIN_COPY, OURS):
        for case in ("suspend_dirty", "resume"):
            both = median_of(rows, peer=peer, case=case, devices=BOTH_DEVICES)
            of_case = [r for r in rows if (r.peer, r.case) == (peer, case)]
            alone = [r.seconds for r in of_case if r.devices in ("0", "1")]
            if both is None or not alone:
                continue
            one = median(alone)
            aggregate = _ratio(2 * one, both)
            lines.append(_line([f"{peer} {case}", _seconds(one), _seconds(both), aggregate]))
    if not lines:
        return ""
    head = ["", "one device, s", "both at once, s", "aggregate of both links"]
    table = [_line(head), _line(["---"] * len(head)), *lines]
    return "\n".join(["### Two devices", "", *table])


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f}" if seconds >= 0.1 else f"{seconds:.4f}"


def _against(peer: float | None, ours: float | None) -> str:
    if peer is None:
        return ""
    return _seconds(peer) if ours is None else f"{_seconds(peer)} ({_ratio(peer, ours)})"


def _ratio(numerator: float | None, denominator: float | None) -> str:
    if numerator is None or not denominator:
        return ""
    return f"{numerator / denominator:.2f}x"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
