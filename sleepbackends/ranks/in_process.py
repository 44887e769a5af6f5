"""A group whose ranks are backends of this process."""

from __future__ import annotations

from collections.abc import Sequence

from sleepbackends.control import Control
from sleepbackends.protocol import SleepModeBackend
from sleepbackends.ranks.group import RankGroup
from sleepbackends.ranks.merging import merged_states
from sleepbackends.ranks.rank import Rank
from sleepbackends.state import BackendState


class InProcessGroup(RankGroup):
    """Several backends of this process that move together, such as one for each device.

    Each rank works in a thread of its own.

    Parameters
    ----------
    backends : sequence of SleepModeBackend
        The ranks, numbered from 0. The group closes them.
    timeout_s, grace_s : float
        See ``RankGroup``.

    Raises
    ------
    RequestError
        If there is no backend.
    """

    def __init__(
        self,
        backends: Sequence[SleepModeBackend],
        *,
        timeout_s: float = 600.0,
        grace_s: float = 10.0,
    ) -> None:
        self.backends = tuple(backends)
        super().__init__(
            {number: Rank(backend) for number, backend in enumerate(self.backends)},
            timeout_s=timeout_s,
            grace_s=grace_s,
        )

    def state(self) -> BackendState:
        """Return what is where now, added up; never waits."""
        return merged_states({n: backend.state() for n, backend in enumerate(self.backends)})

    def refresh(self, control: Control | None = None) -> None:
        """Do nothing: what is where is seen at once."""
