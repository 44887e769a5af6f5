"""What a sleep does with each tag."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from sleepbackends.errors import ConfigurationError, InvalidLevelError, PolicyConflictError

LEVELS = (0, 1, 2)
"""0 pauses only, 1 keeps contents, 2 drops everything that can be reloaded."""


class Policy(str, Enum):
    """What a sleep does with one tag, from the lightest to the deepest."""

    KEEP = "keep"
    """Stay resident."""
    OFFLOAD = "offload"
    """Save the bytes and give the memory back."""
    DISCARD = "discard"
    """Drop the bytes and give the memory back."""

    @property
    def depth(self) -> int:
        """How much a tag gives up: 0 nothing, 1 its memory, 2 its contents too."""
        return list(Policy).index(self)


@dataclass(frozen=True)
class TagPolicy:
    """The policy of one tag at each level that releases memory.

    Raises
    ------
    ConfigurationError
        If level 2 would give up less than level 1.
    """

    level_1: Policy
    level_2: Policy

    def __post_init__(self) -> None:
        if self.level_2.depth < self.level_1.depth:
            raise ConfigurationError(
                f"conflicting policies: level 2 ({self.level_2.value}) would give up less than "
                f"level 1 ({self.level_1.value})",
                hint="a deeper sleep may only give up as much or more: keep < offload < discard",
            )

    @property
    def expendable(self) -> bool:
        """Whether the contents may be lost in a sleep that keeps contents.

        Such a tag (a KV cache) is valid again as soon as it is mapped and the engine
        dropped what it knew of it; any other discarded tag has to be reloaded.
        """
        return self.level_1 is Policy.DISCARD


_DEFAULT = {
    "kv_cache": TagPolicy(Policy.DISCARD, Policy.DISCARD),
    "weights": TagPolicy(Policy.OFFLOAD, Policy.DISCARD),
}
_UNDECLARED = TagPolicy(Policy.OFFLOAD, Policy.OFFLOAD)


def check_level(level: int) -> int:
    """Return the level, or raise.

    Raises
    ------
    InvalidLevelError
        If it is not 0, 1 or 2.
    """
    if isinstance(level, bool) or level not in LEVELS:
        raise InvalidLevelError(
            f"sleep level {level!r} does not exist",
            hint="0 pauses only, 1 keeps contents, 2 drops everything that can be reloaded",
        )
    return level


@dataclass(frozen=True)
class Policies:
    """The policies of all tags; defaults never lose data.

    ``kv_cache`` is discarded by every sleep, ``weights`` are offloaded at level 1 and
    discarded at level 2, and a tag nobody declared is offloaded at either level.

    Parameters
    ----------
    declared : mapping of str to TagPolicy
        Overrides and additions to the defaults.
    """

    declared: Mapping[str, TagPolicy] = field(default_factory=dict)

    def of(self, tag: str) -> TagPolicy:
        """Return the policy of a tag, declared or not."""
        return self.declared.get(tag) or _DEFAULT.get(tag, _UNDECLARED)

    def at(self, tag: str, level: int) -> Policy:
        """Return what a sleep of that level does with the tag.

        Raises
        ------
        InvalidLevelError
            If there is no such level.
        """
        check_level(level)
        if level == 0:
            return Policy.KEEP
        policy = self.of(tag)
        return policy.level_1 if level == 1 else policy.level_2

    def discarding(self, tags: Collection[str]) -> Policies:
        """Return the same policies with these tags discarded by every sleep."""
        discard = TagPolicy(Policy.DISCARD, Policy.DISCARD)
        return Policies({**self.declared, **dict.fromkeys(tags, discard)})

    def check_releasable(self, tags: Collection[str]) -> None:
        """Refuse to release tags that the configuration keeps resident.

        Raises
        ------
        PolicyConflictError
            If the level-1 policy of a tag is ``keep``.
        """
        kept = sorted(tag for tag in tags if self.of(tag).level_1 is Policy.KEEP)
        if kept:
            raise PolicyConflictError(
                f"tags {kept} have the policy 'keep'",
                hint="change the policy in the configuration to release them",
                tags=kept,
            )

    def __iter__(self) -> Iterator[str]:
        return iter({**_DEFAULT, **self.declared})
