"""Snapshots of what is where: per tag and per backend."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sleepbackends.errors import RequestError, UnknownTagError
from sleepbackends.residency import Residency


@dataclass(frozen=True)
class TagState:
    """The blocks of one tag, added up.

    Parameters
    ----------
    resident_bytes, offloaded_bytes, discarded_bytes, undefined_bytes : int
        Bytes of the tag's blocks by residency.
    blocks : int
        How many allocations there are.
    epoch : int
        How many times contents of this tag were dropped. Whatever was computed from
        contents of an earlier epoch (a prefix cache) is stale.
    """

    resident_bytes: int = 0
    offloaded_bytes: int = 0
    discarded_bytes: int = 0
    undefined_bytes: int = 0
    blocks: int = 0
    epoch: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks, wherever they are."""
        return self.mapped_bytes + self.asleep_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes that take up memory now."""
        return self.resident_bytes + self.undefined_bytes

    @property
    def asleep_bytes(self) -> int:
        """Bytes that take up no memory now."""
        return self.offloaded_bytes + self.discarded_bytes

    def bytes_in(self, residency: Residency) -> int:
        """Return how many bytes are in one residency."""
        size: int = getattr(self, f"{residency.value}_bytes")
        return size

    @property
    def residencies(self) -> frozenset[Residency]:
        """The residencies this tag's blocks are in; more than one after a partial failure."""
        return frozenset(r for r in Residency if self.bytes_in(r))

    @property
    def usable(self) -> bool:
        """Whether every byte is resident and valid."""
        return self.total_bytes == self.resident_bytes


@dataclass(frozen=True)
class BackendState:
    """What one backend holds, tag by tag, at one moment."""

    tags: Mapping[str, TagState] = field(default_factory=lambda: MappingProxyType({}))
    """The blocks of each tag, added up."""
    context_released: bool | None = None
    """Whether the device context is gone as well, so that nobody may use the device. None: as the
    capabilities say, as soon as anything is asleep."""
    ranks: Mapping[int, BackendState] = field(default_factory=lambda: MappingProxyType({}))
    """What each rank holds, where the backend is made of several; ``tags`` is their sum."""

    @property
    def mapped_bytes(self) -> int:
        """Bytes that take up memory now."""
        return sum(tag.mapped_bytes for tag in self.tags.values())

    @property
    def asleep_bytes(self) -> int:
        """Bytes that take up no memory now."""
        return sum(tag.asleep_bytes for tag in self.tags.values())

    def asleep_tags(self) -> frozenset[str]:
        """Tags of which at least one block is not mapped."""
        return frozenset(name for name, tag in self.tags.items() if tag.asleep_bytes)

    def undefined_tags(self) -> frozenset[str]:
        """Tags of which at least one block waits to be refilled."""
        return frozenset(name for name, tag in self.tags.items() if tag.undefined_bytes)

    def unusable_tags(self) -> frozenset[str]:
        """Tags that are not resident and valid to the last byte."""
        return frozenset(name for name, tag in self.tags.items() if not tag.usable)


def check_tags(tags: Collection[str], known: Collection[str], operation: str) -> frozenset[str]:
    """Return the tags as a set, or raise before anything changes.

    Raises
    ------
    RequestError
        If a single string was given where a collection of tags belongs.
    UnknownTagError
        If a tag is not among the known ones; the error lists those.
    """
    if isinstance(tags, str):
        raise RequestError(
            f"{operation}: tags must be a collection of strings, not the string {tags!r}",
            hint=f"pass [{tags!r}]",
            operation=operation,
        )
    wanted = frozenset(tags)
    unknown = wanted - set(known)
    if unknown:
        names = ", ".join(sorted(map(repr, unknown)))
        listed = ", ".join(sorted(map(repr, known))) or "none yet"
        raise UnknownTagError(
            f"{operation}: unknown tag {names}; known tags: {listed}",
            hint="a tag is known once memory was allocated under it",
            known=known,
            operation=operation,
            tags=unknown,
        )
    return wanted
