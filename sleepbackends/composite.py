"""Two backends as one: ``outer`` owns memory by tag, ``inner`` takes the whole process.

A sleep first follows the outer backend's policies, so that little is left, and then puts the
process itself to sleep. A resume restores the process first, then the tags that were asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from sleepbackends.capabilities import Capabilities, combined
from sleepbackends.control import Control
from sleepbackends.errors import (
    ConfigurationError,
    SleepBackendsError,
    SuspendedError,
    add_note,
)
from sleepbackends.lock import TransitionLock
from sleepbackends.policies import Policies, Policy, TagPolicy, check_level
from sleepbackends.protocol import API_VERSION, SleepModeBackend, Staging
from sleepbackends.reports import (
    DiscardReport,
    FailureReport,
    ResumeReport,
    Staged,
    SuspendReport,
    TransitionReport,
    compare,
)
from sleepbackends.residency import Move, Placement, moved
from sleepbackends.settings import BackendSettings
from sleepbackends.state import BackendState, check_tags

Depth = Literal["memory", "process"]
"""How deep a sleep goes: the outer backend's memory, or the process as well."""

_KEEP = TagPolicy(Policy.KEEP, Policy.KEEP)
_OFFLOAD = TagPolicy(Policy.OFFLOAD, Policy.OFFLOAD)


class CompositeBackend:
    """An outer backend over an inner one that takes the whole process.

    What the outer backend offers besides the contract (``region``, ``adopt``, ``graph_pool``)
    is offered as well.

    Parameters
    ----------
    outer : SleepModeBackend
        Owns memory by tag.
    inner : SleepModeBackend
        Owns none: its tags stand for all that the process holds. May have
        ``check_suspend()``, which refuses what would fail before the outer one begins, and
        ``process_states()``, which notices whether somebody else has woken the process.
    settings : BackendSettings, optional
        What is common to all backends.
    depth : {"memory", "process"}
        How deep a sleep goes where no policy says so for a tag of the inner backend.

    Raises
    ------
    ConfigurationError
        If the two cannot be put together; neither was closed.
    """

    api_version = API_VERSION

    def __init__(
        self,
        outer: SleepModeBackend,
        inner: SleepModeBackend,
        settings: BackendSettings | None = None,
        *,
        depth: Depth = "process",
    ) -> None:
        if inner.capabilities.owns_allocations or not inner.capabilities.releases_device_context:
            raise ConfigurationError(
                f"{inner.name!r} cannot be put under {outer.name!r}: it does not take the whole "
                "process",
                hint="name a process-level backend last, as in 'cumem+checkpoint'",
            )
        self.outer = outer
        self.inner = inner
        self.name = f"{outer.name}+{inner.name}"
        self.settings = settings or BackendSettings()
        self.depth: Depth = depth
        self.capabilities = combined(outer.capabilities, inner.capabilities)
        """What the two can do together, in a sleep of any depth."""
        self._lock = TransitionLock()
        self._outer_when_asleep: BackendState | None = None

    def capabilities_of_sleep(self, level: int, policies: Policies) -> Capabilities:
        """Return the flags of one sleep: the outer backend's own if the process stays awake."""
        together = self.capabilities
        if level and self._reaches_process(level, policies):
            return together
        own = self.outer.capabilities
        return replace(own, supports_durable_storage=together.supports_durable_storage)

    def suspend(
        self,
        level: int = 1,
        *,
        policies: Policies | None = None,
        control: Control | None = None,
        depth: Depth | None = None,
    ) -> SuspendReport:
        """Release memory by policy, then the process; see ``SleepModeBackend.suspend``.

        Parameters
        ----------
        level, policies, control
            As for every backend.
        depth : {"memory", "process"}, optional
            How deep this sleep goes, whatever the policies say of the inner backend's tags.

        Raises
        ------
        SleepBackendsError
            As each backend. What the inner one would refuse is refused before anything changed.

        Notes
        -----
        Guarantee: if it raises, either nothing changed, or ``error.report`` says exactly
        which tags are where: a process that could not be put to sleep leaves the outer
        backend's tags asleep. No bytes that a policy keeps are lost, and the call can be
        repeated.
        """
        check_level(level)
        policies = self._policies(policies or self.settings.policies, depth)
        with self._transition("suspend", control) as (control, before):
            started = time.perf_counter()
            deep = bool(level) and self._reaches_process(level, policies)
            wanted = {tag: policies.at(tag, level) for tag in before.tags}
            steps: list[TransitionReport] = []
            if self._process_asleep():
                # Calls into the driver would wait, and all that could be released is.
                _refuse_conflicts(before, wanted)
            else:
                check: Callable[[], None] | None = getattr(self.inner, "check_suspend", None)
                if deep and check is not None:
                    check()
                steps.append(self.outer.suspend(level, policies=policies, control=control))
                if deep:
                    self._outer_when_asleep = self.outer.state()
                    steps.append(self.inner.suspend(level, policies=policies, control=control))
            return SuspendReport(
                backend=self.name,
                operation="suspend",
                level=level,
                changed=any(step.changed for step in steps),
                tags=compare(before, self.state(), wanted),
                copied_bytes=sum(step.copied_bytes for step in steps),
                clean_bytes=sum(step.clean_bytes for step in steps),
                spared_bytes=sum(step.spared_bytes for step in steps),
                seconds=time.perf_counter() - started,
                phases=_phases(steps),
            )

    def resume(
        self, tags: Collection[str] | None = None, *, control: Control | None = None
    ) -> ResumeReport:
        """Restore the process, then the tags; see ``SleepModeBackend.resume``.

        The process is restored for any tag, as nothing else can be without it.

        Raises
        ------
        SleepBackendsError
            As each backend.

        Notes
        -----
        Guarantee: if it raises, every tag of the outer backend that it was to wake is still
        asleep, saved bytes are still saved, and the call can be repeated. The process may be
        awake by then: ``error.report`` says so.
        """
        with self._transition("resume", control) as (control, before):
            started = time.perf_counter()
            everything = tags is None
            wanted = (
                frozenset(before.tags) if tags is None else check_tags(tags, before.tags, "resume")
            )
            steps: list[TransitionReport] = []
            if wanted and self._process_asleep():
                steps.append(self.inner.resume(control=control))
                self._outer_when_asleep = None
            ours = wanted - set(self.inner.state().tags)
            if ours or everything:
                steps.append(self.outer.resume(None if everything else ours, control=control))
            after = self.state()
            return ResumeReport(
                backend=self.name,
                operation="resume",
                changed=any(step.changed for step in steps),
                tags=compare(before, after, dict.fromkeys(wanted)),
                copied_bytes=sum(step.copied_bytes for step in steps),
                spared_bytes=sum(step.spared_bytes for step in steps),
                seconds=time.perf_counter() - started,
                phases=_phases(steps),
                undefined_tags=after.undefined_tags() & wanted,
            )

    def discard(self, tags: Collection[str], *, control: Control | None = None) -> DiscardReport:
        """Have the outer backend release tags; see ``SleepModeBackend.discard``.

        Raises
        ------
        SuspendedError
            The process is asleep; nothing changed.
        SleepBackendsError
            As the outer backend.

        Notes
        -----
        Guarantee: as the outer backend's.
        """
        with self._transition("discard", control) as (control, before):
            wanted = check_tags(tags, before.tags, "discard")
            if self._process_asleep() and any(before.tags[tag].mapped_bytes for tag in wanted):
                raise self._suspended("discard")
            if self._process_asleep():
                _refuse_conflicts(before, dict.fromkeys(wanted, Policy.DISCARD))
                policies = dict.fromkeys(wanted, Policy.DISCARD)
                return DiscardReport(
                    backend=self.name,
                    operation="discard",
                    changed=False,
                    tags=compare(before, before, policies),
                )
            return replace(self.outer.discard(tags, control=control), backend=self.name)

    def mark_valid(self, tags: Collection[str]) -> None:
        """Declare that UNDEFINED memory was refilled; see ``SleepModeBackend.mark_valid``.

        Raises
        ------
        SleepBackendsError
            As the outer backend.

        Notes
        -----
        Guarantee: if it raises, nothing changed.
        """
        with self._transition("mark_valid", None) as (_, before):
            check_tags(tags, before.tags, "mark_valid")
            if ours := frozenset(tags) - set(self.inner.state().tags):
                self.outer.mark_valid(ours)

    def state(self) -> BackendState:
        """Return what is where, of both; never waits and changes nothing.

        What was freed while the process was asleep is counted until it wakes up.
        """
        inner = self.inner.state()
        outer = self._outer_when_asleep if inner.asleep_tags() else None
        if outer is None:
            # Not asked of one whose process sleeps: a thread that waits for the driver may
            # hold its locks, and nobody could wake the process any more.
            outer = self.outer.state()
        tags = {**outer.tags, **inner.tags}
        return BackendState(MappingProxyType(tags), context_released=bool(inner.asleep_tags()))

    def stage(
        self,
        tags: Collection[str] | None = None,
        *,
        background: bool = True,
        limit_gib_s: float = 2.0,
    ) -> Staging:
        """Have the outer backend copy ahead; see ``StagingBackend.stage``.

        Raises
        ------
        SuspendedError
            The process is asleep.
        SleepBackendsError
            As the outer backend.
        """
        if self._process_asleep():
            raise self._suspended("stage")
        able: Any = self.outer
        staging: Staging = able.stage(tags, background=background, limit_gib_s=limit_gib_s)
        return staging

    def staged(self) -> Staged:
        """Tell what is saved of memory that is in use: nothing while the process is asleep."""
        able: Any = self.outer
        found: Staged = Staged() if self._process_asleep() else able.staged()
        return found

    def close(self) -> None:
        """Wake the process if it is asleep, and close both backends; once that is done, nothing.

        Raises
        ------
        SleepBackendsError
            If the process cannot be woken, without which the outer backend cannot give
            anything back. Nothing was closed, and the call can be repeated.
        """
        with self._lock.hold("close", Control()):
            if self._process_asleep():
                self.inner.resume()
            self.inner.close()
            self.outer.close()

    def __getattr__(self, name: str) -> Any:
        # What is not of the contract (regions, pools) is the outer backend's.
        if name.startswith("_") or name in ("outer", "inner"):
            raise AttributeError(name)
        return getattr(self.outer, name)

    def _process_asleep(self) -> bool:
        return bool(self.inner.state().asleep_tags())

    def _policies(self, policies: Policies, depth: Depth | None) -> Policies:
        """Let the inner backend's tags follow the depth, where it is given or they are not."""
        forced = depth is not None
        chosen = _OFFLOAD if (depth or self.depth) == "process" else _KEEP
        ours = {
            tag: chosen for tag in self.inner.state().tags if forced or tag not in policies.declared
        }
        return Policies({**policies.declared, **ours})

    def _reaches_process(self, level: int, policies: Policies) -> bool:
        chosen = self._policies(policies, None)
        return any(chosen.at(tag, level) is not Policy.KEEP for tag in self.inner.state().tags)

    def _suspended(self, operation: str) -> SuspendedError:
        return SuspendedError(
            f"{operation} needs the device and the process is asleep", hint="resume() first"
        )

    @contextmanager
    def _transition(
        self, operation: str, control: Control | None
    ) -> Iterator[tuple[Control, BackendState]]:
        control = control or Control()
        with self._lock.hold(operation, control):
            look: Callable[[], object] | None = getattr(self.inner, "process_states", None)
            if look is not None and self._process_asleep():
                look()
            before = self.state()
            try:
                yield control, before
            except SleepBackendsError as error:
                error.backend, error.operation = self.name, operation
                tags = compare(before, self.state(), dict.fromkeys(before.tags))
                changed = any(change.changed for change in tags.values())
                error.report = FailureReport(
                    backend=self.name, operation=operation, changed=changed, tags=tags
                )
                if changed and operation == "suspend":
                    add_note(error, "what error.report says is asleep already: resume() it")
                raise


def _refuse_conflicts(state: BackendState, wanted: Mapping[str, Policy]) -> None:
    """Refuse what contradicts where sleeping tags are, as each backend would."""
    moves = {Policy.OFFLOAD: Move.OFFLOAD, Policy.DISCARD: Move.DISCARD}
    for name, policy in wanted.items():
        tag = state.tags[name]
        if policy is Policy.KEEP:
            continue
        if tag.offloaded_bytes:
            moved(moves[policy], Placement(mapped=False, owed=True))
        if tag.discarded_bytes:
            moved(moves[policy], Placement(mapped=False, defined=False))


def _phases(steps: list[TransitionReport]) -> dict[str, float]:
    """Name the phases by the backend they were spent in."""
    return {
        f"{step.backend}: {name}": spent for step in steps for name, spent in step.phases.items()
    }
