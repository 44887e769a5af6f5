"""The same transition on every rank of an engine, all or none.

A group is a backend, so that one orchestrator drives it like any other. ``InProcessGroup``
holds backends of this process, ``TorchDistributedGroup`` rides on the process group an engine
has already, ``RayGroup`` on its Ray actors. Neither torch nor Ray is imported before the
group that needs it is made.
"""

from __future__ import annotations

from sleepbackends.ranks.group import RankGroup
from sleepbackends.ranks.in_process import InProcessGroup
from sleepbackends.ranks.messages import Answer, Command
from sleepbackends.ranks.rank import Rank
from sleepbackends.ranks.ray_actors import RayGroup
from sleepbackends.ranks.torch_distributed import TorchDistributedGroup

__all__ = [
    "Answer",
    "Command",
    "InProcessGroup",
    "Rank",
    "RankGroup",
    "RayGroup",
    "TorchDistributedGroup",
]
