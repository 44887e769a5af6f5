"""Random calls to an orchestrator, with failing hooks and a failing backend.

Whatever happens: an engine serves only with everything resident, valid and rebuilt; it is
told of every loss of contents before it serves; and no bytes a policy keeps are lost.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from sleepbackends import (
    Capabilities,
    HookError,
    Orchestrator,
    SleepBackendsError,
    Status,
    SuspendedError,
)
from sleepbackends.testing import FakeEngine, FaultInjector, SimulatedBackend, SimulatedOptions
from sleepbackends.testing.faults import STEPS
from sleepbackends.testing.simulated import ALL

TAGS = ("weights", "kv_cache", "lora")
HOOKS = (
    "quiesce", "teardown_communicators", "drop_caches", "rebuild_communicators", "reload",
    "recompile", "recapture_graphs", "unquiesce",
)  # fmt: skip
UNSELECTIVE = replace(ALL, supports_selective_release=False)
FRAGILE = replace(
    UNSELECTIVE,
    supports_selective_resume=False,
    preserves_communicators=False,
    preserves_compiled_artifacts=False,
    preserves_graphs_with_communicators=False,
)


class WatchedEngine(FakeEngine):
    """Refills memory when asked, and checks each hook against what it was promised."""

    def __init__(self, backend: SimulatedBackend) -> None:
        super().__init__()
        self.backend = backend
        self.memory: dict[str, Any] = {}
        self.seen_epochs: dict[str, int] = {}
        self.quiet = False

    def epochs(self) -> dict[str, int]:
        return {name: tag.epoch for name, tag in self.backend.state().tags.items()}

    def _record(self, hook: str, *args: Any) -> None:
        super()._record(hook, *args)
        if hook == "quiesce":
            assert not self.quiet, "quiesced twice"
            self.quiet = True
        elif hook == "drop_caches":
            self.seen_epochs.update({tag: self.epochs()[tag] for tag in args[0]})
        elif hook == "reload":
            for tag in args[0]:
                self.memory[tag].write(tag.encode()[:1] * 64)
        elif hook == "unquiesce":
            assert not self.backend.state().unusable_tags(), "serves without its memory"
            assert self.seen_epochs == self.epochs(), "serves with stale caches"
            self.quiet = False


class OrchestratorMachine(RuleBasedStateMachine):
    capabilities: Capabilities

    @initialize()
    def start(self) -> None:
        backend = SimulatedBackend(SimulatedOptions(self.capabilities))
        self.engine = WatchedEngine(backend)
        for tag in TAGS:
            with backend.region(tag) as region:
                self.engine.memory[tag] = region.buffer(64)
            self.engine.memory[tag].write(tag.encode()[:1] * 64)
        with backend.region("kv_cache") as region:
            region.buffer(64)  # so that a fault may come after half of it was dropped
        self.engine.seen_epochs = self.engine.epochs()
        self.backend = backend
        self.orchestrator = Orchestrator(backend, hooks=self.engine.hooks())

    @rule(hook=st.sampled_from(HOOKS))
    def break_hook(self, hook: str) -> None:
        self.engine.fail[hook] = RuntimeError("told to fail")

    @rule()
    def mend_hooks(self) -> None:
        self.engine.fail.clear()

    @rule(
        verb=st.sampled_from(["sleep", "sleep", "wake_up", "wake_up", "release"]),
        level=st.integers(0, 2),
        tags=st.one_of(st.none(), st.sets(st.sampled_from(TAGS))),
        fault=st.one_of(st.none(), st.tuples(st.sampled_from(STEPS), st.integers(0, 3))),
    )
    def transition(
        self, verb: str, level: int, tags: set[str] | None, fault: tuple[str, int] | None
    ) -> None:
        before = self.orchestrator.state()
        injector = FaultInjector(self.backend, {fault[0]: [fault[1]]} if fault else {})
        try:
            with injector:
                if verb == "sleep":
                    self.orchestrator.sleep(level)
                elif verb == "wake_up":
                    self.orchestrator.wake_up(tags)
                else:
                    self.orchestrator.release(tags or {"kv_cache"})
        except HookError as error:
            assert self.orchestrator.state().status is Status.FAULTED
            assert error.hook in self.engine.fail
        except SleepBackendsError as error:
            if not injector.fired:
                assert self.orchestrator.state() == before, f"refused, yet changed: {error}"

    @invariant()
    def an_engine_that_serves_has_everything(self) -> None:
        state = self.orchestrator.state()
        assert state.serving == (state.status is Status.AWAKE)
        if state.serving:
            assert not state.memory.unusable_tags()
            assert not state.pending_hooks
            assert not state.fault
            assert not self.engine.quiet
            with self.orchestrator.use():
                for tag, memory in self.engine.memory.items():
                    expected = bytes(64) if tag == "kv_cache" else tag.encode()[:1] * 64
                    assert memory.read() in (expected, tag.encode()[:1] * 64)
        else:
            with pytest.raises(SuspendedError), self.orchestrator.use():
                raise AssertionError("admitted while not serving")

    def teardown(self) -> None:
        """There is always a way back."""
        if not hasattr(self, "orchestrator"):
            return
        self.engine.fail.clear()
        with contextlib.suppress(SleepBackendsError):
            self.orchestrator.wake_up()
        assert self.orchestrator.wake_up().serving
        self.an_engine_that_serves_has_everything()
        self.orchestrator.close()


@pytest.mark.parametrize("capabilities", [ALL, UNSELECTIVE, FRAGILE])
def test_random_transitions(capabilities: Capabilities) -> None:
    machine = type("Machine", (OrchestratorMachine,), {"capabilities": capabilities})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=200,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
