"""Exactly one sleep state is 1 at every moment, whatever happens and whoever reads."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from prometheus_client import CollectorRegistry

from sleepbackends import (
    Capabilities,
    HookError,
    Orchestrator,
    Policy,
    SleepBackendsError,
    SleepConfig,
    TagPolicy,
)
from sleepbackends.metrics import Metrics
from sleepbackends.sleep_state import SleepState
from sleepbackends.testing import FakeEngine, FaultInjector, SimulatedBackend, SimulatedOptions
from sleepbackends.testing.faults import STEPS
from sleepbackends.testing.simulated import ALL

AWAKE, RELEASED = SleepState.AWAKE, SleepState.KV_CACHE_RELEASED
OFFLOADED, DISCARDED = SleepState.WEIGHTS_OFFLOADED, SleepState.DISCARD_ALL
UNSELECTIVE = replace(ALL, supports_selective_release=False)
NEITHER = replace(UNSELECTIVE, supports_selective_resume=False)


def states_of(registry: CollectorRegistry) -> dict[str, float]:
    return {
        sample.labels["sleep_state"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "sleepbackends_engine_sleep_state"
    }


class Scraper(threading.Thread):
    """Scrapes as fast as it can and keeps what is not exactly one state."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(daemon=True)
        self.registry = registry
        self.scrapes = 0
        self.wrong: list[object] = []
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                states = states_of(self.registry)
            except Exception as error:  # noqa: BLE001 - it is what the test looks at
                self.wrong.append(error)
                return
            self.scrapes += 1
            if sorted(states.values()) != [0.0, 0.0, 0.0, 1.0]:
                self.wrong.append(states)


POLICIES = st.dictionaries(
    st.sampled_from(["weights", "lora", "kv_cache"]),
    st.sampled_from(
        [TagPolicy(one, two) for one in Policy for two in Policy if two.depth >= one.depth]
    ),
)


class SleepStateMachine(RuleBasedStateMachine):
    """Random transitions with faults, under the eyes of a scraper in another thread."""

    seen: set[SleepState]

    @initialize(
        capabilities=st.sampled_from([ALL, UNSELECTIVE, NEITHER]),
        policies=POLICIES,
        reloads=st.booleans(),
    )
    def start(
        self, capabilities: Capabilities, policies: dict[str, TagPolicy], reloads: bool
    ) -> None:
        config = SleepConfig(policies=policies)
        self.policies = config.tag_policies
        self.backend = SimulatedBackend(SimulatedOptions(capabilities), config.settings)
        for tag in ("weights", "lora", "kv_cache", "kv_cache"):
            with self.backend.region(tag) as region:
                region.buffer(64)
        self.engine = FakeEngine()
        hooks = self.engine.hooks(*(() if reloads else ("reload",)))
        self.orchestrator = Orchestrator(self.backend, config=config, hooks=hooks)
        self.metrics = Metrics()
        self.metrics.observe(self.orchestrator)
        self.scraper = Scraper(self.metrics.registry)
        self.scraper.start()
        self.by_release = False

    @rule(hook=st.sampled_from(["drop_caches", "reload", "unquiesce", "quiesce"]))
    def break_hook(self, hook: str) -> None:
        self.engine.fail[hook] = RuntimeError("told to fail")

    @rule()
    def mend_hooks(self) -> None:
        self.engine.fail.clear()

    @rule(
        verb=st.sampled_from(["sleep", "wake_up", "wake_up", "release", "release"]),
        level=st.integers(0, 2),
        tags=st.one_of(st.none(), st.sets(st.sampled_from(["weights", "lora", "kv_cache"]))),
        fault=st.one_of(st.none(), st.tuples(st.sampled_from(STEPS), st.integers(0, 3))),
    )
    def transition(
        self, verb: str, level: int, tags: set[str] | None, fault: tuple[str, int] | None
    ) -> None:
        before = self.orchestrator.state()
        faults = FaultInjector(self.backend, {fault[0]: [fault[1]]} if fault else {})
        with suppress(SleepBackendsError), faults:
            if verb == "sleep":
                self.orchestrator.sleep(level)
            elif verb == "wake_up":
                self.orchestrator.wake_up(tags)
            else:
                self.orchestrator.release(tags or {"kv_cache"})
        after = self.orchestrator.state()
        if after.memory == before.memory:
            assert after.sleep_state is before.sleep_state, "set although nothing happened"
        then, now = before.memory.tags["kv_cache"], after.memory.tags["kv_cache"]
        if now.epoch != then.epoch:
            self.by_release = verb == "release" and "kv_cache" in (tags or {"kv_cache"})
        elif now.mapped_bytes:
            self.by_release = False

    @rule(tag=st.sampled_from(["weights", "lora", "kv_cache"]))
    def mark_valid(self, tag: str) -> None:
        if not self.orchestrator.state().memory.tags[tag].asleep_bytes:
            try:
                self.orchestrator.mark_valid({tag})
            except HookError:
                assert self.engine.fail

    @invariant()
    def the_state_is_what_happened(self) -> None:
        state = self.orchestrator.state()
        self.seen.add(state.sleep_state)
        tags = state.memory.tags
        lost = {
            name
            for name, tag in tags.items()
            if (tag.discarded_bytes or tag.undefined_bytes)
            and self.policies.at(name, 1) is not Policy.DISCARD
        }
        missing = lost | {name for name, tag in tags.items() if tag.asleep_bytes}
        exported = states_of(self.metrics.registry)
        assert exported == {s.value: float(s is state.sleep_state) for s in SleepState}
        assert not self.scraper.wrong
        if state.sleep_state is RELEASED:
            assert self.by_release
            assert not tags["kv_cache"].mapped_bytes
            assert not lost - {"kv_cache"}
        elif self.by_release and missing == {"kv_cache"}:
            assert tags["kv_cache"].mapped_bytes, "all of it is released and nothing else"
        if state.sleep_state is AWAKE:
            assert not missing
        if state.sleep_state is DISCARDED:
            assert lost
        if state.sleep_state is OFFLOADED:
            assert missing
            assert not lost
        if state.serving:
            assert state.sleep_state is AWAKE

    def teardown(self) -> None:
        if hasattr(self, "scraper"):
            self.scraper.stop.set()
            self.scraper.join(30)
            assert not self.scraper.wrong


def test_exactly_one_state_at_every_moment_whatever_happens() -> None:
    seen: set[SleepState] = set()
    run_machine(
        type("Machine", (SleepStateMachine,), {"seen": seen}),
        settings=settings(
            max_examples=100,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert seen == set(SleepState), "the test never came to some state"
