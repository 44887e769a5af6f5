"""Rows of measurements, and the medians and rates made of them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

OURS = "sleepbackends"
PLAIN_COPY = "plain_copy"
PEERS = ("vllm", "tms", "tms_retain")

IN_TURN = "in_turn"
"""Ours and peers in one process, with a KV cache or weights each: what slows the machine down for
a while slows all of them down."""

STAGED = "staged"
"""Ours, with the weights staged before each suspend."""

DOWN = (
    "suspend_first",
    "suspend_first_staged",
    "suspend_dirty",
    "suspend_1pct",
    "suspend_clean",
)
UP = ("resume",)
CASES = (*DOWN, *UP, "discard_kv", "resume_kv")

WHOLE = ("suspend_first", "suspend_dirty", "resume")
"""In these all bytes of the weights have to cross the link."""

MEANINGS = {
    "suspend_first": "the weights are saved for the first time: host memory has to be taken too, "
    "which the machine has given once before",
    "suspend_first_staged": "every byte was changed and staged since: the first time, and later",
    "suspend_dirty": "every byte of the weights was changed since the last resume",
    "suspend_1pct": "one chunk of 32 MiB in every 100 was changed since the last resume",
    "suspend_clean": "nothing was changed since the last resume",
    "resume": "everything comes back: weights restored, KV cache without contents",
    "discard_kv": "the KV cache alone is given back and forgotten",
    "resume_kv": "memory for the KV cache alone is taken again",
}
"""What each case is."""

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
        The size of the weight tensors; 0 for what is measured in one process and in turn.
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


class Workload(NamedTuple):
    """What was in memory: rows with the same of it can be compared."""

    weights_gib: float
    kv_gib: float
    tensor_mib: float
    """0 where allocators were measured in one process and in turn."""


def chosen(rows: Iterable[Row], **wanted: object) -> list[Row]:
    """Return the rows with these values."""
    return [
        row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())
    ]


def median_of(rows: Iterable[Row], **wanted: object) -> float | None:
    """Return the median seconds of the rows with these values; None if there are none."""
    seconds = [row.seconds for row in chosen(rows, **wanted)]
    return median(seconds) if seconds else None


def workloads(rows: Iterable[Row]) -> list[tuple[Workload, list[Row]]]:
    """Group the rows of allocators by what was in memory, large tensors first."""
    found: dict[Workload, list[Row]] = defaultdict(list)
    for row in rows:
        if row.peer != PLAIN_COPY:
            found[Workload(row.weights_gib, row.kv_gib, row.tensor_mib)].append(row)
    return sorted(found.items(), key=lambda item: (*item[0][:2], -item[0].tensor_mib))


def link_rates(rows: Sequence[Row], weights_gib: float | None = None) -> dict[str, float]:
    """Return the rates of the plain copies of one device in GiB/s, by direction.

    Parameters
    ----------
    rows : sequence of Row
        Where to look.
    weights_gib : float, optional
        Of copies of so much, where there are some; else of all.

    Returns
    -------
    rates : dict
        ``down_gib_s`` and ``up_gib_s``, as far as they are known.
    """
    rates = {}
    for name, case in (("down_gib_s", "suspend_dirty"), ("up_gib_s", "resume")):
        plain = chosen(rows, peer=PLAIN_COPY, case=case, devices="0")
        plain = chosen(plain, weights_gib=weights_gib) or plain
        if plain:
            rates[name] = median(row.weights_gib / row.seconds for row in plain)
    return rates


def share_of_link(
    rows: Sequence[Row], workload: Workload, case: str, seconds: float | None
) -> float | None:
    """Return the part of the link's rate at which the weights moved.

    None where not all of them have to move, or it is not known.
    """
    rate = link_rates(rows, workload.weights_gib).get("down_gib_s" if case in DOWN else "up_gib_s")
    if not seconds or rate is None or case not in WHOLE:
        return None
    return workload.weights_gib / seconds / rate


def two_devices(rows: Iterable[Row]) -> Iterator[tuple[Row, float, float]]:
    """Compare one device with both at once.

    Yields
    ------
    row : Row
        One of those that are compared.
    one, both : float
        Median seconds of one device alone, and of both at once.
    """
    kinds: dict[tuple[float, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        kinds[row.weights_gib, row.peer, row.case].append(row)
    for same in kinds.values():
        both = median_of(same, devices=BOTH_DEVICES)
        alone = [row.seconds for row in same if row.devices != BOTH_DEVICES]
        if both is not None and alone:
            yield same[0], median(alone), both
