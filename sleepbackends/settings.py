"""What every backend is told when it is created, whichever it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from sleepbackends.mechanism import Fill
from sleepbackends.policies import Policies


@dataclass(frozen=True)
class BackendSettings:
    """Settings common to all backends; a backend's own are in its options model.

    Parameters
    ----------
    policies : Policies
        What a sleep does with each tag.
    wait_for_memory_s : float
        How long a resume waits for a neighbour to give memory back before it fails.
    fill : Fill
        What discarded memory holds when it is mapped again.
    """

    policies: Policies = field(default_factory=Policies)
    wait_for_memory_s: float = 0.0
    fill: Fill = Fill.ZERO
