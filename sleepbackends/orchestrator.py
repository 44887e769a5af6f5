"""The orchestrator: one per engine; owns order and policy, never a mechanism."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sleepbackends.capabilities import Capabilities
from sleepbackends.config import SleepConfig, load_config
from sleepbackends.control import Control, ProgressCallback
from sleepbackends.engine import EngineHooks, QuiesceMode
from sleepbackends.engine_state import EngineReport, EngineState, derive_status
from sleepbackends.fallback import run_release
from sleepbackends.observers import Observers
from sleepbackends.plan import Plan, plan_release, plan_sleep, plan_wake
from sleepbackends.policies import Policies, check_level
from sleepbackends.protocol import SleepModeBackend, Staging, capabilities_of_sleep
from sleepbackends.reports import TransitionReport
from sleepbackends.selection import open_backend
from sleepbackends.service import Service
from sleepbackends.staging import Stager
from sleepbackends.state import check_tags
from sleepbackends.transition import Transitions

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
        automatic = self.config.staging == "automatic"
        self._stager = Stager(backend, automatic, self.config.stage_limit_gib_s)
        self._transitions = Transitions(backend, self._service)

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

    @property
    def observers(self) -> Observers:
        """Who is told of each transition when it has ended."""
        return self._transitions.observers

    def state(self) -> EngineState:
        """Return what is where and whether the engine serves; never waits."""
        service = self._service
        # Asked on both sides of the snapshot: a release may begin or end meanwhile.
        releasing = service.releases.going_on
        memory = self.backend.state()
        releasing |= service.releases.going_on
        current = self._transitions.lock.current
        return EngineState(
            status=derive_status(memory, self._policies, service.serving, service.fault),
            serving=service.serving,
            memory=memory,
            sleep_state=service.sleep_state(memory, releasing),
            pending_hooks=service.owed.pending,
            fault=str(service.fault) if service.fault else "",
            transition=str(current) if current else "",
            progress=current.control.progress if current else None,
        )

    def plan_sleep(self, level: int = 1) -> Plan:
        """Tell what ``sleep(level)`` would do; raises what it would refuse with."""
        able = capabilities_of_sleep(self.backend, level, self._policies)
        return plan_sleep(level, self.backend.state(), self._policies, able, self._stager.staged())

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
        policies: Policies | None = None,
        timeout_s: float | None = None,
        on_progress: ProgressCallback | None = None,
        control: Control | None = None,
    ) -> EngineReport:
        """Stop serving and release memory following each tag's policy.

        Parameters
        ----------
        level : int
            0 pauses only, 1 keeps contents, 2 drops what can be reloaded.
        mode : {"wait", "abort", "keep"}, optional
            What the engine does with running requests; the configuration's by default.
        policies : Policies, optional
            Use these for this call instead of the configured ones.
        timeout_s : float, optional
            Deadline of this call; the configuration's by default.
        on_progress : callable, optional
            Called with a ``Progress`` while bytes are copied.
        control : Control, optional
            Use this one in place of ``timeout_s`` and ``on_progress``; another thread may
            cancel it.

        Raises
        ------
        RequestError, UnsupportedOperationError
            Refused; nothing changed, the engine serves on.
        BusyError
            Another transition or a user of the memory was still there at the deadline;
            the engine serves on.
        NoRoomError, TransitionTimeoutError, TransitionCancelledError, MechanismError
            The backend failed. Where nothing was released the engine serves on; otherwise
            ``error.report`` says what is where, and sleep and wake_up can be repeated.
        HookError
            The engine is FAULTED.
        """
        check_level(level)
        policies = policies or self._policies
        control = control or self._control(timeout_s, on_progress)
        with self._transitions.begin("sleep", control) as transition:
            able = capabilities_of_sleep(self.backend, level, policies)
            plan_sleep(level, transition.before, policies, able)
            paused = self._service.pause(mode or self.config.quiesce_mode, control)
            steps: list[TransitionReport] = []
            if level:
                with self._service.serving_on_after_failure(paused):
                    self._service.before_suspend(able)
                    steps.append(self.backend.suspend(level, policies=policies, control=control))
                self._service.after_step(steps[0], able)
            self._service.rest()
            return transition.report(steps, changed=paused)

    def wake_up(
        self,
        tags: Collection[str] | None = None,
        *,
        timeout_s: float | None = None,
        on_progress: ProgressCallback | None = None,
        control: Control | None = None,
    ) -> EngineReport:
        """Take memory again, restore or reload it, and serve once everything is there.

        Parameters
        ----------
        tags : collection of str, optional
            Which tags; None means all. Tags that are awake are left alone; an empty
            collection does nothing.
        timeout_s, on_progress, control
            As in ``sleep``.

        Raises
        ------
        UnknownTagError, UnsupportedOperationError
            Refused; nothing changed.
        NoRoomError, ContentsLostError, TransitionTimeoutError, TransitionCancelledError, \
        MechanismError
            Everything is still asleep; the same call can be made again.
        HookError
            Memory is back, the engine is FAULTED; the same call runs the hooks that are
            still owed.
        """
        control = control or self._control(timeout_s, on_progress)
        with self._transitions.begin("wake_up", control) as transition:
            self.plan_wake(tags)
            was_serving = self._service.serving
            steps: list[TransitionReport] = []
            if not was_serving and (tags is None or tags):
                with self._service.serving_on_after_failure(was_serving):
                    steps.append(self.backend.resume(tags, control=control))
                self._service.settle()
            woke = self._service.serving and not was_serving
            report = transition.report(steps, changed=woke)
        if woke:
            self._stager.when_filled()
        return report

    def loaded(self) -> None:
        """Say that the engine has loaded its contents: they are staged if so configured."""
        self._stager.when_filled()

    def stage(self, tags: Collection[str] | None = None, *, background: bool = True) -> Staging:
        """Copy contents ahead while the engine serves, so that a sleep has less left to copy.

        By default what a sleep at level 1 keeps; see ``StagingBackend.stage``.

        Raises
        ------
        UnsupportedOperationError, UnknownTagError
            The backend cannot stage, or there is no such tag.
        """
        return self._stager.stage(tags, background=background)

    def release_kv_cache(
        self,
        *,
        timeout_s: float | None = None,
        on_progress: ProgressCallback | None = None,
        control: Control | None = None,
    ) -> EngineReport:
        """Release the tag ``kv_cache`` and leave the rest resident; see ``release``."""
        return self.release(
            {_KV_CACHE}, timeout_s=timeout_s, on_progress=on_progress, control=control
        )

    def release(
        self,
        tags: Collection[str],
        *,
        timeout_s: float | None = None,
        on_progress: ProgressCallback | None = None,
        control: Control | None = None,
    ) -> EngineReport:
        """Stop serving, release the named tags and forget their contents.

        The strongest strategy that the capabilities allow is used: selective, suspend and
        reload, or full suspend (``degraded``). ``plan_release`` names it beforehand.

        Raises
        ------
        RequestError, UnsupportedOperationError
            Refused; nothing changed, the engine serves on.
        BusyError, NoRoomError, TransitionTimeoutError, TransitionCancelledError, \
        MechanismError, HookError
            As in ``sleep``.
        """
        control = control or self._control(timeout_s, on_progress)
        with self._transitions.begin("release", control) as transition:
            plan = self.plan_release(tags)
            steps: list[TransitionReport] = []
            if plan.changes and plan.strategy is not None:
                paused = self._service.pause(self.config.quiesce_mode, control)
                with (
                    self._service.serving_on_after_failure(paused),
                    self._service.releases.during(transition.before, tags),
                ):
                    if plan.strategy.suspends_everything:
                        self._service.before_suspend(self.capabilities)
                    for step in run_release(
                        plan.strategy, self.backend, tags, self._policies, control
                    ):
                        steps.append(step)
                        self._service.after_step(step, self.capabilities, released=tags)
                self._service.settle()
            return transition.report(steps, plan=plan)

    def mark_valid(self, tags: Collection[str], *, control: Control | None = None) -> EngineReport:
        """Say that the caller has refilled these tags; serve if nothing else is missing.

        Raises
        ------
        UnknownTagError, PolicyConflictError
            A tag is unknown or not mapped; nothing changed.
        HookError
            The engine is FAULTED.
        """
        with self._transitions.begin("mark_valid", control or self._control()) as transition:
            check_tags(tags, transition.before.tags, "mark_valid")
            self.backend.mark_valid(tags)
            if not self._service.serving:
                self._service.settle()
            return transition.report()

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
            # Asked after the lease was counted: a transition that begins now waits for it.
            if tags is not None:
                self._service.check_usable(tags, self._busy())
            yield

    def close(self) -> None:
        """Stop admitting work, wait for a transition that is going on, close the backend.

        Saved bytes are dropped, unless the backend's storage is durable. Repeating the
        call does nothing.
        """
        with self._transitions.lock.hold("close", Control()):
            self._transitions.closed = True
            self._service.leases.close_gate("the orchestrator was closed")
            self.backend.close()

    def __enter__(self) -> Orchestrator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _control(
        self, timeout_s: float | None = None, on_progress: ProgressCallback | None = None
    ) -> Control:
        limit_s = self.config.timeout_s if timeout_s is None else timeout_s
        return Control(timeout_s=limit_s, on_progress=on_progress)

    def _busy(self) -> str:
        if self._transitions.closed:
            return "the orchestrator was closed"
        current = self._transitions.lock.current
        return f"{current} is going on" if current else ""
