"""What one process of ``benchmarks.scale`` measures, and the rows it finds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GIB, MIB = 1 << 30, 1 << 20

LAYOUTS = {
    "processes": "one process a GPU, over TorchDistributedGroup",
    "ray": "one actor a GPU, over RayGroup",
    "threads": "one process, a backend a GPU, over InProcessGroup",
    "single": "one process, one backend for all GPUs",
}

WHOLE_PROCESS = "checkpoint"
"""A backend with this in its name takes a whole process, so that one process has one of it."""


@dataclass(frozen=True)
class Spec:
    """What one process measures, with those that it starts.

    Parameters
    ----------
    layout : str
        One of ``LAYOUTS``.
    backend : str
        The backend of every rank, as a configuration names it.
    ranks : int
        How many GPUs; a backend without GPUs has as many parts.
    weights_gib, kv_gib : float
        How much memory a sleep keeps and drops, on each.
    tensor_mib : float
        The size of the weight tensors.
    plain_gib : float
        How much host memory a plain copy has on each; it goes through it several times, until
        as much as the weights was copied.
    rounds : int
        How often everything is done.
    timeout_s : float
        The deadline of every transition.
    faults : bool
        Whether one rank is made to fail, too.
    """

    layout: str
    backend: str
    ranks: int
    weights_gib: float = 16.0
    kv_gib: float = 32.0
    tensor_mib: float = 256.0
    plain_gib: float = 4.0
    rounds: int = 3
    timeout_s: float = 60.0
    faults: bool = True

    @property
    def title(self) -> str:
        """What to call it; no two of one run have the same."""
        return f"{self.backend}, {self.layout}, {self.ranks}"

    @property
    def on_gpus(self) -> bool:
        """Whether its memory is a GPU's."""
        return self.backend.startswith("cumem")

    @property
    def weights_bytes(self) -> int:
        """How many bytes of weights each rank has: whole tensors."""
        return self.tensors * self.tensor_bytes

    @property
    def tensors(self) -> int:
        """How many weight tensors each rank has."""
        return max(1, int(self.weights_gib * GIB) // self.tensor_bytes)

    @property
    def tensor_bytes(self) -> int:
        """How large each of them is."""
        return int(self.tensor_mib * MIB)

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class Row:
    """One measurement.

    Parameters
    ----------
    layout, backend : str
        See ``Spec``.
    ranks : int
        How many there were.
    case : str
        What was measured; see ``cases``.
    round : int
        Counted from 0.
    seconds : float
        From the first rank's beginning to the last one's end.
    rank_seconds : list of float
        How long each rank took; empty where that cannot be told apart.
    size_bytes : int
        How many bytes of each rank it was about.
    copied_bytes : int
        How many bytes of all ranks had to be copied.
    outcome : str
        Where the ranks were after one of them had failed.
    phases : mapping of str to float
        Seconds in the phases of the slowest rank.
    """

    layout: str
    backend: str
    ranks: int
    case: str
    round: int
    seconds: float
    rank_seconds: Sequence[float] = ()
    size_bytes: int = 0
    copied_bytes: int = 0
    outcome: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def gib_s(self) -> float:
        """The rate of all ranks together."""
        return self.ranks * self.size_bytes / GIB / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return what is kept of it in a file."""
        return dataclasses.asdict(self)


Emit = Callable[[Row], None]
"""Takes each row as soon as it is known."""
