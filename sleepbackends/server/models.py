"""What the routes take and reply: the contract that their OpenAPI document describes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from sleepbackends.control import Progress
from sleepbackends.engine import QuiesceMode
from sleepbackends.engine_state import EngineReport, EngineState, Status
from sleepbackends.fallback import ReleaseStrategy
from sleepbackends.plan import Plan
from sleepbackends.policies import LEVELS, Policy
from sleepbackends.reports import TagChange
from sleepbackends.sleep_state import SleepState
from sleepbackends.state import BackendState, TagState

# Told, and left to the orchestrator to check, so that the error is its own.
_LEVELS: dict[str, JsonValue] = {"minimum": LEVELS[0], "maximum": LEVELS[-1]}


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NoQuery(_Request):
    """A route without query parameters: one that is given is an error, never ignored."""


class SleepQuery(_Request):
    """How to sleep."""

    level: int = Field(
        default=1,
        description="0 pauses, 1 keeps contents, 2 drops what can be reloaded.",
        json_schema_extra=_LEVELS,
    )
    mode: QuiesceMode | None = Field(
        default=None, description="What to do with running requests; by default as configured."
    )


class WakeQuery(_Request):
    """What to wake."""

    tags: list[str] | None = Field(default=None, description="Repeat for several; all by default.")


class PlanQuery(_Request):
    """What to plan."""

    operation: Literal["sleep", "wake_up", "release"]
    level: int | None = Field(
        default=None, description="Of a sleep; 1 by default.", json_schema_extra=_LEVELS
    )
    tags: list[str] | None = Field(default=None, description="Of a wake-up or a release.")


class EventsQuery(_Request):
    """Where to begin."""

    since: int | None = Field(
        default=None,
        ge=0,
        description="Ended transitions after this id first, as far as they are kept.",
    )


class OccupationBody(_Request):
    """The JSON body of SGLang's two calls."""

    tags: list[str] | None = Field(default=None, description="All if it is missing, null or empty.")
    rid: str | list[str] | None = Field(default=None, description="SGLang's request id; not used.")


class TagReply(BaseModel):
    """Where the bytes of one tag are."""

    resident_bytes: int
    offloaded_bytes: int
    discarded_bytes: int
    undefined_bytes: int
    epoch: int = Field(description="How many times contents were dropped.")

    @classmethod
    def of(cls, tag: TagState) -> TagReply:
        """Convert the state of one tag."""
        return cls(
            resident_bytes=tag.resident_bytes,
            offloaded_bytes=tag.offloaded_bytes,
            discarded_bytes=tag.discarded_bytes,
            undefined_bytes=tag.undefined_bytes,
            epoch=tag.epoch,
        )

    @classmethod
    def all_of(cls, memory: BackendState) -> dict[str, TagReply]:
        """Convert the state of every tag."""
        return {name: cls.of(tag) for name, tag in sorted(memory.tags.items())}

    @classmethod
    def after(cls, changes: Mapping[str, TagChange]) -> dict[str, TagReply]:
        """Convert what is so after a transition."""
        return {name: cls.of(change.after) for name, change in sorted(changes.items())}


class TransitionReply(BaseModel):
    """What a call did; the sleep states are ``from`` and ``to``."""

    operation: str
    changed: bool = Field(description="False where everything was already so.")
    before: SleepState = Field(serialization_alias="from")
    after: SleepState = Field(serialization_alias="to")
    serving: bool
    released_bytes: int = Field(description="Memory given back; negative where it was taken.")
    degraded: bool
    reason: str = Field(description="Why this strategy, after a release.")
    strategy: ReleaseStrategy | None
    undefined_tags: list[str] = Field(description="Tags that wait to be refilled.")
    seconds: float
    tags: dict[str, TagReply]

    @classmethod
    def of(cls, report: EngineReport) -> TransitionReply:
        """Convert a report."""
        return cls(
            operation=report.operation,
            changed=report.changed,
            before=report.sleep_state_before,
            after=report.sleep_state,
            serving=report.serving,
            released_bytes=report.released_bytes,
            degraded=report.degraded,
            reason=report.reason,
            strategy=report.strategy,
            undefined_tags=sorted(report.undefined_tags),
            seconds=report.seconds,
            tags=TagReply.after(report.tags),
        )


class SleepingReply(BaseModel):
    """Whether the engine is not serving."""

    is_sleeping: bool


class CapabilitiesReply(BaseModel):
    """What the backend can do."""

    backend: str
    capabilities: dict[str, bool]


class TagPlanReply(BaseModel):
    """What would happen to one tag."""

    policy: Policy | None
    size_bytes: int
    copied_bytes: int


class PlanReply(BaseModel):
    """What a call would do."""

    operation: str
    changes: bool
    size_bytes: int
    host_bytes_needed: int
    packed_bytes: int | None = Field(
        description="How many of those are likely to be used; null before the first suspend."
    )
    strategy: ReleaseStrategy | None
    degraded: bool
    reason: str
    reload_tags: list[str]
    copy_s: float | None
    tags: dict[str, TagPlanReply]

    @classmethod
    def of(cls, plan: Plan) -> PlanReply:
        """Convert a plan."""
        return cls(
            operation=plan.operation,
            changes=plan.changes,
            size_bytes=plan.size_bytes,
            host_bytes_needed=plan.host_bytes_needed,
            packed_bytes=plan.packed_bytes,
            strategy=plan.strategy,
            degraded=plan.degraded,
            reason=plan.reason,
            reload_tags=sorted(plan.reload_tags),
            copy_s=plan.copy_s,
            tags={
                name: TagPlanReply(
                    policy=tag.policy, size_bytes=tag.size_bytes, copied_bytes=tag.copied_bytes
                )
                for name, tag in sorted(plan.tags.items())
            },
        )


class ProgressReply(BaseModel):
    """How far the transition that is going on has come."""

    transition: str = Field(description="The transition and its thread.")
    step: str
    done_bytes: int
    total_bytes: int

    @classmethod
    def of(cls, transition: str, progress: Progress) -> ProgressReply:
        """Convert the progress of a transition."""
        return cls(
            transition=transition,
            step=progress.operation,
            done_bytes=progress.done_bytes,
            total_bytes=progress.total_bytes,
        )


class StateReply(BaseModel):
    """What is so now."""

    status: Status
    serving: bool
    sleep_state: SleepState
    pending_hooks: list[str]
    fault: str
    progress: ProgressReply | None = Field(description="Null while no transition is going on.")
    tags: dict[str, TagReply]
    ranks: dict[int, dict[str, TagReply]] = Field(
        description="The same of each rank; empty unless the backend is made of several."
    )

    @classmethod
    def of(cls, state: EngineState) -> StateReply:
        """Convert a snapshot."""
        going_on = (
            None if state.progress is None else ProgressReply.of(state.transition, state.progress)
        )
        return cls(
            status=state.status,
            serving=state.serving,
            sleep_state=state.sleep_state,
            pending_hooks=list(state.pending_hooks),
            fault=state.fault,
            progress=going_on,
            tags=TagReply.all_of(state.memory),
            ranks={n: TagReply.all_of(rank) for n, rank in sorted(state.memory.ranks.items())},
        )


def wanted(tags: Collection[str] | None) -> frozenset[str] | None:
    """Return the tags of a request as a set; None, which means all, where there are none."""
    return frozenset(tags) if tags else None
