"""One word for where an engine's memory is, derived from what happened to it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import MappingProxyType

from sleepbackends.policies import Policies
from sleepbackends.reports import TransitionReport
from sleepbackends.state import BackendState, TagState

_KV_CACHE = "kv_cache"


class SleepState(str, Enum):
    """Where the memory is; always exactly one, the first in this order that applies.

    A tag is *missing* while some of it is not mapped, or while contents of it are gone that
    its level-1 policy does not discard. Whether the engine serves is another matter.
    """

    AWAKE = "awake"
    """Nothing is missing. So it is after level 0, and during a release until it is done."""
    KV_CACHE_RELEASED = "kv_cache_released"
    """A release dropped all of ``kv_cache``, which has not been mapped since. Nothing else
    is missing, but for other tags released whole that their level-1 policy discards."""
    DISCARD_ALL = "discard_all"
    """Contents are gone that a sleep at level 1 keeps: they have to be reloaded."""
    WEIGHTS_OFFLOADED = "weights_offloaded"
    """Something else is missing, and waking brings back all that a sleep at level 1 keeps."""


class Releases:
    """What releases dropped, and what one of them is dropping now."""

    def __init__(self) -> None:
        self.epochs: Mapping[str, int] = MappingProxyType({})
        self.going_on: frozenset[str] = frozenset()

    @contextmanager
    def during(self, before: BackendState, tags: Collection[str]) -> Iterator[None]:
        """Name what a release is about to drop, as long as it goes on."""
        mapped = {name for name, tag in before.tags.items() if tag.mapped_bytes}
        self.going_on = frozenset(mapped & set(tags))
        try:
            yield
        finally:
            self.going_on = frozenset()

    def note(self, step: TransitionReport, tags: Collection[str]) -> None:
        """Remember the epoch to which a step of a release brought the tags it dropped."""
        dropped = step.dropped_tags & frozenset(tags)
        if dropped:
            # Replaced, never changed: readers in other threads do not wait.
            self.epochs = {**self.epochs, **{tag: step.tags[tag].after.epoch for tag in dropped}}


def derive_sleep_state(
    memory: BackendState,
    policies: Policies,
    released: Mapping[str, int],
    releasing: Collection[str] = (),
) -> SleepState:
    """Derive the state of an engine's memory.

    Parameters
    ----------
    memory : BackendState
        What is where.
    policies : Policies
        What a sleep at level 1 keeps.
    released : mapping of str to int
        The epoch to which a release brought each tag that one dropped. A tag that was
        mapped or dropped again since has another epoch, or is mapped.
    releasing : collection of str
        What a release that is going on drops. It does not count before it is done.
    """
    whole = {
        name
        for name, tag in memory.tags.items()
        if tag.discarded_bytes == tag.total_bytes and released.get(name) == tag.epoch
    }
    gone = {name for name, tag in memory.tags.items() if _reloads(name, tag, policies)}
    unfinished = {
        name
        for name, tag in memory.tags.items()
        if name in releasing and name not in whole and not tag.offloaded_bytes
    }
    missing = (memory.asleep_tags() | gone) - unfinished
    if not missing:
        return SleepState.AWAKE
    others = missing - {_KV_CACHE}
    if _KV_CACHE in missing & whole and others <= whole - gone:
        return SleepState.KV_CACHE_RELEASED
    return SleepState.DISCARD_ALL if missing & gone else SleepState.WEIGHTS_OFFLOADED


def _reloads(name: str, tag: TagState, policies: Policies) -> bool:
    return bool(tag.discarded_bytes or tag.undefined_bytes) and not policies.of(name).expendable
