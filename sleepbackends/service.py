"""Whether the engine serves: pause it, and let it serve again once everything is there."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from sleepbackends.capabilities import Capabilities
from sleepbackends.control import Control
from sleepbackends.engine import EngineHooks, QuiesceMode
from sleepbackends.errors import (
    BusyError,
    HookError,
    SleepBackendsError,
    SuspendedError,
    TransitionCancelledError,
    add_note,
)
from sleepbackends.leases import Leases
from sleepbackends.obligations import Obligations
from sleepbackends.policies import Policies
from sleepbackends.protocol import SleepModeBackend
from sleepbackends.reports import TransitionReport
from sleepbackends.sleep_state import Releases, SleepState, derive_sleep_state
from sleepbackends.state import BackendState, check_tags


class Service:
    """The gate, the engine's hooks and what is owed to it, on one side of a transition.

    Parameters
    ----------
    backend : SleepModeBackend
        Asked what is where.
    hooks : EngineHooks
        The engine's callbacks.
    policies : Policies
        Which tags are valid as soon as they are mapped.
    """

    def __init__(self, backend: SleepModeBackend, hooks: EngineHooks, policies: Policies) -> None:
        self.leases = Leases()
        self.fault: HookError | None = None
        self.owed = Obligations(hooks)
        self.releases = Releases()
        self._backend = backend
        self._policies = policies
        self._can_reload = hooks.reload is not None
        self._quiet = False

    @property
    def serving(self) -> bool:
        """Whether work is admitted."""
        return self.leases.is_open

    def sleep_state(self, memory: BackendState, releasing: Collection[str] = ()) -> SleepState:
        """Derive in one word where the memory is; see ``derive_sleep_state``.

        It may be asked of the moment before a release as well: what one drops was mapped, so
        that the epoch it leads to tells nothing about that moment.
        """
        return derive_sleep_state(memory, self._policies, self.releases.epochs, releasing)

    def pause(self, mode: QuiesceMode, control: Control) -> bool:
        """Stop serving; tell whether the engine was serving until now.

        Raises
        ------
        HookError
            The quiesce hook raised; it runs again at the next attempt.
        BusyError
            Somebody still uses the memory at the deadline; an engine that was serving
            serves on.
        TransitionCancelledError
            The transition was cancelled; an engine that was serving serves on.
        """
        was_serving = self.serving
        self.leases.close_gate("the engine is asleep or about to sleep")
        if not self._quiet:
            self.owed.call("quiesce", mode, control.remaining_s())
            self._quiet = True
        try:
            self.leases.drain(control)
        except (BusyError, TransitionCancelledError):
            if was_serving:
                self._serve()
            raise
        return was_serving

    def check_usable(self, tags: Collection[str], busy: str) -> None:
        """Check that work on some tags may go on.

        Parameters
        ----------
        tags : collection of str
            What the work needs.
        busy : str
            What keeps all work away, or nothing.

        Raises
        ------
        UnknownTagError
            If there is no such tag.
        SuspendedError
            If it may not.
        """
        memory = self._backend.state()
        wanted = check_tags(tags, memory.tags, "use")
        unusable = sorted(wanted & memory.unusable_tags())
        if busy:
            why = busy
        elif self.fault is not None:
            why = "the engine is FAULTED"
        elif unusable:
            why = f"{unusable} are not resident and valid"
        elif self.owed.pending:
            why = f"hooks have to run first: {', '.join(self.owed.pending)}"
        else:
            return
        raise SuspendedError(f"not admitted: {why}", hint="wake_up() first", tags=wanted)

    def before_suspend(self, capabilities: Capabilities) -> None:
        """Prepare the engine for a suspend of which these flags are true."""
        self.owed.tear_down(capabilities)

    def after_step(
        self,
        step: TransitionReport,
        capabilities: Capabilities,
        *,
        released: Collection[str] = (),
    ) -> None:
        """Note what a step of the backend leaves to be done."""
        if step.operation == "suspend":
            self.owed.suspended(capabilities)
        self.releases.note(step, released)
        self.owed.stale(step.dropped_tags | frozenset(released))

    @contextmanager
    def serving_on_after_failure(self, was_serving: bool) -> Iterator[None]:
        """Serve again if the backend fails without having released anything.

        What it dropped before it failed is noted, so that the engine hears of it.
        """
        try:
            yield
        except HookError:
            raise
        except Exception as error:
            self._note_losses(error)
            if was_serving:
                try:
                    self.settle()
                except SleepBackendsError as second:
                    self.fault = second if isinstance(second, HookError) else self.fault
                    add_note(error, f"going on serving failed: {second}")
            raise

    def _note_losses(self, error: Exception) -> None:
        report = error.report if isinstance(error, SleepBackendsError) else None
        if not isinstance(report, TransitionReport) or not report.changed:
            return
        if report.operation == "suspend":
            self.owed.suspended(self._backend.capabilities)
        self.owed.stale(report.dropped_tags)

    def settle(self) -> None:
        """Do what is owed as far as the memory allows, and serve if everything is there.

        Raises
        ------
        HookError
            A hook raised; it and what comes after it are still owed.
        """
        state = self._backend.state()
        if self._context_gone(state):
            return
        self.rest()
        asleep = state.asleep_tags()
        if state.mapped_bytes or not asleep:
            self._refill(state.undefined_tags())
        if not self._backend.state().unusable_tags():
            self.owed.discharge("recompile", "recapture_graphs")
            self._serve()

    def rest(self) -> None:
        """Have the engine drop what it computed from contents that are gone.

        Raises
        ------
        HookError
            The hook raised; it is still owed.
        """
        if not self._context_gone(self._backend.state()):
            self.owed.drop_caches()
        self.fault = None

    def _context_gone(self, state: BackendState) -> bool:
        # Hooks may use the device, so they wait until it is there again.
        if state.context_released is not None:
            return state.context_released
        return self._backend.capabilities.releases_device_context and bool(state.asleep_tags())

    def _refill(self, undefined: frozenset[str]) -> None:
        self.owed.discharge("rebuild_communicators")
        expendable = {tag for tag in undefined if self._policies.of(tag).expendable}
        if expendable:
            self._backend.mark_valid(expendable)
        missing = undefined - expendable
        if missing and self._can_reload:
            self.owed.call("reload", missing)
            self._backend.mark_valid(missing)

    def _serve(self) -> None:
        self.owed.call("unquiesce")
        self._quiet = False
        self.leases.open_gate()
