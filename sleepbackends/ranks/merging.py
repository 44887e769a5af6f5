"""Many ranks as one: what they can do, what they hold, what they did, where they differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

from sleepbackends.capabilities import Capabilities
from sleepbackends.reports import TagChange, TransitionReport
from sleepbackends.state import BackendState, TagState

_COUNTS = tuple(field.name for field in fields(TagState))


def common(capabilities: Iterable[Capabilities]) -> Capabilities:
    """Return what all ranks can do, and whether any of them gives its device context back.

    A group does not stage: each rank does so by itself.
    """
    all_of = list(capabilities)
    flags = {name: all(getattr(one, name) for one in all_of) for name in Capabilities.names()}
    flags["releases_device_context"] = any(one.releases_device_context for one in all_of)
    return Capabilities(**{**flags, "supports_staging": False})


def merged_states(ranks: Mapping[int, BackendState]) -> BackendState:
    """Add up what ranks hold. The epoch of a tag counts the losses on all of them."""
    tags: defaultdict[str, list[TagState]] = defaultdict(list)
    for rank in ranks.values():
        for name, tag in rank.tags.items():
            tags[name].append(tag)
    contexts = {rank.context_released for rank in ranks.values()}
    return BackendState(
        {name: _sum(of) for name, of in tags.items()},
        # One that is gone is gone for hooks that use all ranks; else what they agree on.
        context_released=True
        if True in contexts
        else contexts.pop()
        if len(contexts) == 1
        else None,
        ranks=dict(ranks),
    )


NAME = "ranks"
"""What a group is called in reports."""


def merged_reports(ranks: Mapping[int, TransitionReport]) -> dict[str, Any]:
    """Add up what ranks did, as the fields that all reports have."""
    changes: defaultdict[str, list[TagChange]] = defaultdict(list)
    phases: dict[str, float] = {}
    for report in ranks.values():
        for name, change in report.tags.items():
            changes[name].append(change)
        for name, seconds in report.phases.items():
            phases[name] = max(seconds, phases.get(name, 0.0))
    return {
        "backend": NAME,
        "changed": any(report.changed for report in ranks.values()),
        "tags": {
            name: TagChange(
                _sum([change.before for change in of]),
                _sum([change.after for change in of]),
                of[0].policy,
            )
            for name, of in changes.items()
        },
        "copied_bytes": sum(report.copied_bytes for report in ranks.values()),
        "clean_bytes": sum(report.clean_bytes for report in ranks.values()),
        "spared_bytes": sum(report.spared_bytes for report in ranks.values()),
        "phases": phases,
        "ranks": dict(ranks),
    }


def differences(state: BackendState) -> list[str]:
    """Say of each tag that ranks hold in different residencies which rank has it where."""
    found = []
    for name in sorted(state.tags):
        places: defaultdict[str, list[int]] = defaultdict(list)
        for number, rank in state.ranks.items():
            residencies = rank.tags.get(name, TagState()).residencies
            if residencies:
                places[" and ".join(sorted(r.value for r in residencies))].append(number)
        if len(places) > 1:
            where = ", ".join(f"{place} on {named(on)}" for place, on in places.items())
            found.append(f"{name!r} is {where}")
    return found


def named(ranks: Collection[int]) -> str:
    """Name ranks in a sentence."""
    numbers = ", ".join(map(str, sorted(ranks)))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _sum(tags: Collection[TagState]) -> TagState:
    return TagState(*(sum(getattr(tag, name) for tag in tags) for name in _COUNTS))
