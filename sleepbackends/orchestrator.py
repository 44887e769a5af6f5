"""The orchestrator: one per engine; owns order and policy, never a mechanism."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sleepbackends.capabilities import Capabilities
from sleepbackends.config import SleepConfig, load_config
from sleepbackends.control import Control, ProgressCallback
from sleepbackends.engine import EngineHooks, QuiesceMode
from sleepbackends.engine_state import EngineReport, EngineState, derive_status
from sleepbackends.errors import ClosedError, HookError, SleepBackendsError, SuspendedError
from sleepbackends.fallback import run_release
from sleepbackends.lock import TransitionLock
from sleepbackends.plan import Plan, plan_release, plan_sleep, plan_wake
from sleepbackends.policies import Policy, check_level
from sleepbackends.protocol import SleepModeBackend
from sleepbackends.reports import TransitionReport, compare
from sleepbackends.selection import open_backend
from sleepbackends.service import Service
from sleepbackends.state import BackendState, check_tags

if TYPE_CHECKING:
    from sleepbackends.registry import Registry

_KV_CACHE = "kv_cache"


class Orchestrator:
    """Puts one engine's memory to sleep and wakes it, through whichever backend.

    Transitions are serialised; each has a deadline. The engine serves again only once
    everything it needs is resident and valid.

    Parameters
    ----------
    backend : SleepModeBackend
        The backend that owns the engine's memory. The orchestrator closes it.
    config : SleepConfig, optional
        Policies, fallbacks and deadlines.
    hooks : EngineHooks, optional
        Callbacks into the engine.
    """

    def __init__(
        self,
        backend: SleepModeBackend,
        *,
        config: SleepConfig | None = None,
        hooks: EngineHooks | None = None,
    ) -> None:
        self.backend = backend
        self.config = config or SleepConfig()
        self._policies = self.config.tag_policies
        self._hooks = hooks or EngineHooks()
        self._service = Service(backend, self._hooks, self._policies)
        self._lock = TransitionLock()
        self._closed = False

    @classmethod
    def create(
        cls,
        config: Any = None,
        *,
        hooks: EngineHooks | None = None,
        registry: Registry | None = None,
    ) -> Orchestrator:
        """Choose and create a backend from a configuration, and an orchestrator over it.

        Parameters
        ----------
        config : SleepConfig, mapping or path, optional
            As ``load_config`` takes it.

        Raises
        ------
        ConfigurationError, PluginError, BackendUnavailableError, NoUsableBackendError
            Nothing was created.
        """
        config = load_config(config)
        return cls(open_backend(config, registry).backend, config=config, hooks=hooks)

    # What could be done, and what is

    @property
    def capabilities(self) -> Capabilities:
        """What the backend can do."""
        return self.backend.capabilities

    def state(self) -> EngineState:
        """Return what is where and whether the engine serves; never waits."""
        memory = self.backend.state()
        current = self._lock.current
        service = self._service
        return EngineState(
            status=derive_status(memory, self._policies, service.serving, service.fault),
            serving=service.serving,
            memory=memory,
            pending_hooks=service.owed.pending,
            fault=str(service.fault) if service.fault else "",
            transition=str(current) if current else "",
            progress=current.control.progress if current else None,
        )

    def plan_sleep(self, level: int = 1) -> Plan:
        """Tell what ``sleep(level)`` would do; raises what it would refuse with."""
        return plan_sleep(level, self.backend.state(), self._policies, self.capabilities)

    def plan_wake(self, tags: Collection[str] | None = None) -> Plan:
        """Tell what ``wake_up(tags)`` would do; raises what it would refuse with."""
        return plan_wake(tags, self.backend.state(), self._policies, self.capabilities)

    def plan_release(self, tags: Collection[str] = (_KV_CACHE,)) -> Plan:
        """Tell what ``release(tags)`` would do; raises what it would refuse with."""
        return plan_release(
            tags,
            self.backend.state(),
            self._policies,
            self.capabilities,
            self.config.on_unselective,
            can_reload=self._hooks.reload is not None,
        )

    # Transitions

    def sleep(
        self,
        level: int = 1,
        *,
        mode: QuiesceMode | None = None,
        timeout_s: float | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> EngineReport:
        """Stop serving and release memory following each tag's policy.

        Parameters
        ----------
        level : int
            0 pauses only, 1 keeps contents, 2 drops what can be reloaded.
        mode : {"wait", "abort", "keep"}, optional
            What the engine does with running requests; the configuration's by default.
        timeout_s : float, optional
            Deadline of this call; the configuration's by default.
        on_progress : callable, optional
            Called with a ``Progress`` while bytes are copied.

        Raises
        ------
        RequestError, UnsupportedOperationError
            Refused; nothing changed, the engine serves on.
        BusyError
            Another transition or a user of the memory was still there at the deadline;
            the engine serves on.
        NoRoomError, TransitionTimeoutError, MechanismError
            The backend failed. Where nothing was released the engine serves on; otherwise
            ``error.report`` says what is where, and sleep and wake_up can be repeated.
        HookError
            The engine is FAULTED.
        """
        check_level(level)
        with self._transition("sleep", timeout_s, on_progress) as (control, before):
            self.plan_sleep(level)
            started = time.perf_counter()
            paused = self._service.pause(mode or self.config.quiesce_mode, control)
            steps: list[TransitionReport] = []
            if level:
                with self._service.serving_on_after_failure(paused):
                    self._service.before_suspend()
                    steps.append(
                        self.backend.suspend(level, policies=self._policies, control=control)
                    )
                self._service.after_step(steps[0])
            self._service.rest()
            return self._report("sleep", before, steps, started, changed=paused)

    def wake_up(
        self,
        tags: Collection[str] | None = None,
        *,
        timeout_s: float | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> EngineReport:
        """Take memory again, restore or reload it, and serve once everything is there.

        Parameters
        ----------
        tags : collection of str, optional
            Which tags; None means all. Tags that are awake are left alone; an empty
            collection does nothing.
        timeout_s, on_progress
            As in ``sleep``.

        Raises
        ------
        UnknownTagError, UnsupportedOperationError
            Refused; nothing changed.
        NoRoomError, ContentsLostError, TransitionTimeoutError, MechanismError
            Everything is still asleep; the same call can be made again.
        HookError
            Memory is back, the engine is FAULTED; the same call runs the hooks that are
            still owed.
        """
        with self._transition("wake_up", timeout_s, on_progress) as (control, before):
            self.plan_wake(tags)
            started = time.perf_counter()
            was_serving = self._service.serving
            steps: list[TransitionReport] = []
            if not was_serving and (tags is None or tags):
                steps.append(self.backend.resume(tags, control=control))
                self._service.settle()
            woke = self._service.serving and not was_serving
            return self._report("wake_up", before, steps, started, changed=woke)

    def release_kv_cache(
        self, *, timeout_s: float | None = None, on_progress: ProgressCallback | None = None
    ) -> EngineReport:
        """Release the tag ``kv_cache`` and leave the rest resident; see ``release``."""
        return self.release({_KV_CACHE}, timeout_s=timeout_s, on_progress=on_progress)

    def release(
        self,
        tags: Collection[str],
        *,
        timeout_s: float | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> EngineReport:
        """Stop serving, release the named tags and forget their contents.

        The strongest strategy that the capabilities allow is used: selective, suspend and
        reload, or full suspend (``degraded``). ``plan_release`` names it beforehand.

        Raises
        ------
        RequestError, UnsupportedOperationError
            Refused; nothing changed, the engine serves on.
        BusyError, NoRoomError, TransitionTimeoutError, MechanismError, HookError
            As in ``sleep``.
        """
        with self._transition("release", timeout_s, on_progress) as (control, before):
            plan = self.plan_release(tags)
            started = time.perf_counter()
            steps: list[TransitionReport] = []
            if plan.changes and plan.strategy is not None:
                paused = self._service.pause(self.config.quiesce_mode, control)
                with self._service.serving_on_after_failure(paused):
                    if plan.strategy.suspends_everything:
                        self._service.before_suspend()
                    for step in run_release(
                        plan.strategy, self.backend, tags, self._policies, control
                    ):
                        steps.append(step)
                        self._service.after_step(step, released=tags)
                self._service.settle()
            return self._report("release", before, steps, started, plan=plan)

    def mark_valid(self, tags: Collection[str]) -> EngineReport:
        """Say that the caller has refilled these tags; serve if nothing else is missing.

        Raises
        ------
        UnknownTagError, PolicyConflictError
            A tag is unknown or not mapped; nothing changed.
        HookError
            The engine is FAULTED.
        """
        with self._transition("mark_valid", None, None) as (_, before):
            started = time.perf_counter()
            check_tags(tags, before.tags, "mark_valid")
            self.backend.mark_valid(tags)
            if not self._service.serving:
                self._service.settle()
            return self._report("mark_valid", before, [], started)

    @contextmanager
    def use(self, tags: Collection[str] | None = None, *, holder: str = "engine") -> Iterator[None]:
        """Guard work on the memory: no transition begins while it runs.

        Parameters
        ----------
        tags : collection of str, optional
            None for work that needs everything: admitted while the engine serves. Named
            tags are enough for work on part of the memory while the rest is asleep.
        holder : str
            Named by the ``BusyError`` of a transition that waited in vain.

        Raises
        ------
        SuspendedError
            Not admitted: memory is asleep, undefined, or about to sleep. Nothing was
            touched.
        """
        with self._service.leases.hold(holder, partial=tags is not None):
            if tags is not None:
                self._check_usable(tags)
            yield

    def close(self) -> None:
        """Stop admitting work, wait for a transition that is going on, close the backend.

        Saved bytes are dropped, unless the backend's storage is durable. Repeating the
        call does nothing.
        """
        with self._lock.hold("close", Control()):
            self._closed = True
            self._service.leases.close_gate("the orchestrator was closed")
            self.backend.close()

    def __enter__(self) -> Orchestrator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _transition(
        self, operation: str, timeout_s: float | None, on_progress: ProgressCallback | None
    ) -> Iterator[tuple[Control, BackendState]]:
        control = Control(
            timeout_s=self.config.timeout_s if timeout_s is None else timeout_s,
            on_progress=on_progress,
        )
        try:
            with self._lock.hold(operation, control):
                if self._closed:
                    raise ClosedError("the orchestrator was closed", hint="create a new one")
                yield control, self.backend.state()
        except SleepBackendsError as error:
            error.backend = error.backend or self.backend.name
            error.operation = error.operation or operation
            if isinstance(error, HookError):
                self._service.fault = error
            raise

    def _check_usable(self, tags: Collection[str]) -> None:
        # Asked after the lease was counted: a transition that begins now waits for it.
        memory = self.backend.state()
        wanted = check_tags(tags, memory.tags, "use")
        unusable = sorted(wanted & memory.unusable_tags())
        pending = self._service.owed.pending
        if self._closed:
            why = "the orchestrator was closed"
        elif self._lock.current is not None:
            why = f"{self._lock.current} is going on"
        elif self._service.fault is not None:
            why = "the engine is FAULTED"
        elif unusable:
            why = f"{unusable} are not resident and valid"
        elif pending:
            why = f"hooks have to run first: {', '.join(pending)}"
        else:
            return
        raise SuspendedError(f"not admitted: {why}", hint="wake_up() first", tags=wanted)

    def _report(
        self,
        operation: str,
        before: BackendState,
        steps: Sequence[TransitionReport],
        started: float,
        *,
        changed: bool = False,
        plan: Plan | None = None,
    ) -> EngineReport:
        after = self.backend.state()
        policies: dict[str, Policy | None] = dict.fromkeys(after.tags)
        for step in steps:
            policies.update(
                {tag: change.policy for tag, change in step.tags.items() if change.policy}
            )
        return EngineReport(
            operation=operation,
            backend=self.backend.name,
            changed=changed or any(step.changed for step in steps),
            serving=self._service.serving,
            tags=compare(before, after, policies),
            steps=tuple(steps),
            strategy=plan.strategy if plan else None,
            degraded=plan.degraded if plan else False,
            reason=plan.reason if plan else "",
            undefined_tags=after.undefined_tags(),
            seconds=time.perf_counter() - started,
        )
