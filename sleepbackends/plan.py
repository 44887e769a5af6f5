"""What a call would do, computed without doing it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sleepbackends.capabilities import Capabilities
from sleepbackends.errors import PolicyConflictError, UnsupportedOperationError
from sleepbackends.fallback import (
    OnUnselective,
    ReleaseStrategy,
    choose_strategy,
    suspend_level,
)
from sleepbackends.policies import Policies, Policy, check_level
from sleepbackends.reports import Staged
from sleepbackends.state import BackendState, TagState, check_tags


@dataclass(frozen=True)
class TagPlan:
    """What would happen to one tag.

    Parameters
    ----------
    policy : Policy or None
        What would be done with its bytes; None for a resume.
    size_bytes : int
        How many of its bytes would be given back or taken.
    copied_bytes : int
        How many of them would be saved or restored.
    """

    policy: Policy | None
    size_bytes: int
    copied_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a call would do.

    Parameters
    ----------
    operation : str
        ``"sleep"``, ``"wake_up"`` or ``"release"``.
    changes : bool
        False where everything is already so.
    tags : mapping of str to TagPlan
        The tags concerned.
    strategy : ReleaseStrategy or None
        How tags would be released; None unless this is a release.
    degraded : bool
        Whether it would be done in a weaker way than asked.
    reason : str
        Why this strategy.
    host_bytes_needed : int
        Room for saved bytes, at most.
    packed_bytes : int or None
        How many of those are likely to be used, packed as well as the last suspend packed; None
        before bytes were saved for the first time.
    staged_bytes : int
        How many of the bytes to be saved have a saved copy already, which is used where they
        did not change since.
    copy_s : float or None
        Seconds that saving the rest would take at the best rate seen so far; None before
        bytes were saved for the first time.
    reload_tags : frozenset of str
        Tags that the engine would have to refill.
    survives_exit : bool
        Whether what is kept can survive the end of this process.
    releases_device_context : bool
        Whether the device context would go as well.
    ranks : mapping of int to Plan
        What each rank would do, where the backend is made of several; ``tags`` is their sum.
    """

    operation: str
    changes: bool
    tags: Mapping[str, TagPlan] = field(default_factory=dict)
    strategy: ReleaseStrategy | None = None
    degraded: bool = False
    reason: str = ""
    host_bytes_needed: int = 0
    packed_bytes: int | None = None
    staged_bytes: int = 0
    copy_s: float | None = None
    reload_tags: frozenset[str] = frozenset()
    survives_exit: bool = False
    releases_device_context: bool = False
    ranks: Mapping[int, Plan] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes given back or taken in all."""
        return sum(tag.size_bytes for tag in self.tags.values())


def plan_sleep(
    level: int,
    state: BackendState,
    policies: Policies,
    capabilities: Capabilities,
    staged: Staged | None = None,
) -> Plan:
    """Plan a sleep.

    Raises
    ------
    InvalidLevelError
        There is no such level.
    PolicyConflictError
        A tag is asleep in another way than this level asks for.
    UnsupportedOperationError
        A policy asks to keep contents and the backend cannot.
    """
    check_level(level)
    tags = {}
    for name, tag in state.tags.items():
        policy = policies.at(name, level)
        _check_compatible(name, tag, policy)
        tags[name] = _suspended(tag, policy)
    copied = sum(tag.copied_bytes for tag in tags.values())
    if copied and not capabilities.supports_offload:
        kept = sorted(name for name, tag in tags.items() if tag.copied_bytes)
        raise UnsupportedOperationError(
            f"tags {kept} are to be offloaded and the backend cannot keep contents: "
            "supports_offload is False",
            hint="sleep at level 2, or give these tags the policy 'discard' or 'keep'",
            operation="sleep",
            tags=kept,
        )
    saved = sum(
        min(tag.copied_bytes, staged.tags.get(name, 0)) for name, tag in tags.items() if staged
    )
    ratio = None if staged is None else staged.packing_ratio
    return Plan(
        operation="sleep",
        changes=any(tag.size_bytes for tag in tags.values()),
        tags=tags,
        host_bytes_needed=copied,
        packed_bytes=None if ratio is None else round(copied * ratio),
        staged_bytes=saved,
        copy_s=(copied - saved) / staged.copy_bytes_s if staged and staged.copy_bytes_s else None,
        survives_exit=capabilities.supports_durable_storage,
        releases_device_context=level > 0 and capabilities.releases_device_context,
        ranks={
            number: plan_sleep(level, rank, policies, capabilities)
            for number, rank in state.ranks.items()
        },
    )


def plan_wake(
    tags: Collection[str] | None,
    state: BackendState,
    policies: Policies,
    capabilities: Capabilities,
) -> Plan:
    """Plan a wake-up.

    Raises
    ------
    UnknownTagError
        A tag is unknown.
    UnsupportedOperationError
        Only some of what is asleep was named and the backend cannot resume selectively.
    """
    known = state.tags
    wanted = frozenset(known) if tags is None else check_tags(tags, known, "wake_up")
    asleep = state.asleep_tags()
    if wanted & asleep and asleep - wanted and not capabilities.supports_selective_resume:
        raise UnsupportedOperationError(
            f"the backend cannot wake {sorted(wanted & asleep)} alone: "
            "supports_selective_resume is False",
            hint="wake everything: wake_up() without tags",
            operation="wake_up",
            tags=asleep - wanted,
        )
    plans = {
        name: TagPlan(None, known[name].asleep_bytes, known[name].offloaded_bytes)
        for name in wanted
    }
    empty = {n for n in wanted if known[n].discarded_bytes or known[n].undefined_bytes}
    return Plan(
        operation="wake_up",
        changes=any(tag.size_bytes for tag in plans.values()),
        tags=plans,
        reload_tags=frozenset(n for n in empty if not policies.of(n).expendable),
        ranks={
            number: plan_wake(wanted & rank.tags.keys(), rank, policies, capabilities)
            for number, rank in state.ranks.items()
        },
    )


def plan_release(
    tags: Collection[str],
    state: BackendState,
    policies: Policies,
    capabilities: Capabilities,
    on_unselective: OnUnselective,
    can_reload: bool,
) -> Plan:
    """Plan a release of the named tags.

    Raises
    ------
    UnknownTagError
        A tag is unknown.
    PolicyConflictError
        A tag's policy is ``keep``, or it is offloaded so that saved bytes would be lost.
    UnsupportedOperationError
        The strategy that would be needed is not allowed, or would drop contents that
        nobody could reload.
    """
    known = set(state.tags) if capabilities.owns_allocations else {*state.tags, *policies}
    wanted = check_tags(tags, known, "release")
    policies.check_releasable(wanted)
    strategy = choose_strategy(capabilities, on_unselective, wanted)
    ours = {name: tag for name, tag in state.tags.items() if name in wanted}
    for name, tag in ours.items():
        _check_compatible(name, tag, Policy.DISCARD)
    rest: dict[str, TagPlan] = {}
    whole = not capabilities.owns_allocations
    changes = any(tag.mapped_bytes for tag in (state.tags if whole else ours).values())
    reload_tags: frozenset[str] = frozenset()
    if changes and strategy is not ReleaseStrategy.SELECTIVE:
        level = suspend_level(capabilities)
        others = BackendState(
            {n: t for n, t in state.tags.items() if n not in wanted and t.mapped_bytes}
        )
        rest = dict(plan_sleep(level, others, policies, capabilities).tags)
        reload_tags = frozenset(
            n
            for n, t in rest.items()
            if t.size_bytes and t.policy is Policy.DISCARD and not policies.of(n).expendable
        )
        if reload_tags and not can_reload:
            raise UnsupportedOperationError(
                f"contents of {sorted(reload_tags)} would be dropped with "
                f"{sorted(wanted)} and there is no reload hook",
                hint="give the orchestrator EngineHooks(reload=...), or choose a backend with "
                "supports_offload or supports_selective_release",
                operation="release",
                tags=reload_tags,
            )
    released = {name: _suspended(tag, Policy.DISCARD) for name, tag in ours.items()}
    return Plan(
        operation="release",
        changes=changes,
        tags={**rest, **released},
        strategy=strategy,
        degraded=changes and strategy.degraded,
        reason=strategy.explanation,
        host_bytes_needed=sum(tag.copied_bytes for tag in rest.values()),
        reload_tags=reload_tags,
        survives_exit=capabilities.supports_durable_storage,
        releases_device_context=(
            strategy is not ReleaseStrategy.SELECTIVE and capabilities.releases_device_context
        ),
        ranks={
            number: plan_release(
                wanted & rank.tags.keys(), rank, policies, capabilities, on_unselective, can_reload
            )
            for number, rank in state.ranks.items()
        },
    )


def _suspended(tag: TagState, policy: Policy) -> TagPlan:
    if policy is Policy.KEEP:
        return TagPlan(policy, 0)
    copied = tag.mapped_bytes if policy is Policy.OFFLOAD else 0
    return TagPlan(policy, tag.mapped_bytes, copied)


def _check_compatible(name: str, tag: TagState, policy: Policy) -> None:
    if policy is Policy.DISCARD and tag.offloaded_bytes:
        what = "is offloaded: the saved bytes would be lost"
    elif policy is Policy.OFFLOAD and tag.discarded_bytes:
        what = "is discarded: its bytes are gone and cannot be kept"
    else:
        return
    raise PolicyConflictError(
        f"tag {name!r} {what}",
        hint=f"wake_up([{name!r}]) first, then ask again, or change the policy of the tag",
        tags=[name],
    )
