"""How tags of torch_memory_saver become tags of a backend, and what a pause does with each.

One tag may have memory with and without a CPU backup, so it becomes up to two, named after
what a pause does with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from sleepbackends.policies import Policies, Policy, TagPolicy

_POLICIES = {policy.value: policy for policy in (Policy.OFFLOAD, Policy.DISCARD)}


def backend_tag(tag: str, enable_cpu_backup: bool) -> str:
    """Name the backend's tag; whatever a tag is here, the name is proper there."""
    policy = Policy.OFFLOAD if enable_cpu_backup else Policy.DISCARD
    return f"{policy.value}:{quote(tag, safe='')}"


def is_selected(known: str, tag: str | None) -> bool:
    """Tell whether a tag of the backend is one of these; None, or no text, selects all."""
    kind, colon, name = known.partition(":")
    ours = colon and kind in _POLICIES
    return bool(ours) and (not tag or name == quote(tag, safe=""))


@dataclass(frozen=True)
class PausePolicies(Policies):
    """What is selected sleeps as its name says, and everything else stays.

    The names decide, and no list of them: a tag that appears at the last moment is not
    offloaded because nobody has declared it.

    Parameters
    ----------
    tag : str or None
        What to pause; None for everything.
    """

    tag: str | None = None

    def of(self, tag: str) -> TagPolicy:
        """Return what a pause does with a tag of the backend."""
        selected = is_selected(tag, self.tag)
        policy = _POLICIES[tag.partition(":")[0]] if selected else Policy.KEEP
        return TagPolicy(policy, policy)
