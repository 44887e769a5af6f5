"""cumem over a process checkpoint, on the simulated driver."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from benchmarks.scaling.cases import CASES
from benchmarks.scaling.spec import Spec
from sleepbackends.capabilities import IN_PROCESS, Capabilities, combined
from sleepbackends.checkpoint.backend import TAG, CheckpointBackend
from sleepbackends.checkpoint.waking import wake
from sleepbackends.composite import CompositeBackend, Depth
from sleepbackends.config import SleepConfig
from sleepbackends.errors import (
    CheckpointRefusedError,
    ConfigurationError,
    DeviceMemoryError,
    InvalidOptionsError,
    LockTimeoutError,
    PolicyConflictError,
    SuspendedError,
    UnknownBackendError,
    UnknownTagError,
)
from sleepbackends.orchestrator import Orchestrator
from sleepbackends.reports import TransitionReport
from sleepbackends.residency import Residency
from sleepbackends.testing import FakeEngine, SimulatedBackend
from tests.bench.scaling import check_rows, measured
from tests.checkpoint.conftest import MIB, SIZE
from tests.native.fixtures import kernel_images, native_library, simulator
from tests.simulators.cuda import SharedDevices, Simulator
from tests.simulators.cuda.driving import Driven, read, write

__all__ = ["kernel_images", "native_library", "simulator"]

ME = os.getpid()
WEIGHTS, KV_CACHE = 4 * MIB, 8 * MIB


class Setup:
    """An orchestrator over both, with weights, a KV cache, and memory that nobody manages."""

    def __init__(
        self, runtime: Path, policies: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.engine = FakeEngine()
        checkpoint = {"helper": False, "runtime_directory": runtime, "device_margin_bytes": 0}
        parts = {"checkpoint": checkpoint, "cumem": {"share_below_bytes": 0}}
        config = SleepConfig(
            backend="cumem+checkpoint", options={**parts, **options}, policies=policies or {}
        )
        self.orchestrator = Orchestrator.create(config, hooks=self.engine.hooks())
        self.backend = _untyped(self.orchestrator.backend)
        self.plain = int(Driven().call("cuMemAlloc", SIZE))
        self.weights = self.backend.allocate("weights", WEIGHTS)
        self.kv_cache = self.backend.allocate("kv_cache", KV_CACHE)
        write(self.plain, b"plain")
        write(self.weights, b"weights")
        write(self.kv_cache, b"kv")

    def residency(self, tag: str) -> Residency:
        (only,) = self.orchestrator.state().memory.tags[tag].residencies
        return only

    def check(self) -> None:
        assert read(self.plain, 5) == b"plain"
        assert read(self.weights, 7) == b"weights"


def _untyped(backend: Any) -> Any:
    return backend


@pytest.fixture
def both(devices: SharedDevices, simulator: Simulator, runtime: Path) -> Iterator[Setup]:
    setup = Setup(runtime)
    yield setup
    devices.set_budget_bytes(None)
    devices.set_busy(ME, False)
    setup.orchestrator.close()


def used(devices: SharedDevices) -> int:
    return devices.used_bytes()[ME]


def test_flags_are_computed_from_the_parts(both: Setup) -> None:
    assert both.backend.name == "cumem+checkpoint"
    flags = both.backend.capabilities
    assert flags == Capabilities(
        supports_selective_release=True,
        supports_selective_resume=True,
        supports_offload=True,
        preserves_addresses=True,
        preserves_compiled_artifacts=True,
        supports_staging=True,
        supports_durable_storage=both.backend.inner.capabilities.supports_durable_storage,
        releases_device_context=True,
        owns_allocations=True,
    )


@pytest.mark.parametrize("flag", Capabilities.names())
def test_a_flag_that_one_part_lacks(flag: str) -> None:
    everything = Capabilities(**dict.fromkeys(Capabilities.names(), True))
    without = replace(everything, **{flag: False})
    outer_alone = (
        *("supports_selective_release", "supports_selective_resume"),
        *("supports_staging", "owns_allocations"),
    )
    either = ("releases_device_context",)
    expected = (flag in either, flag in (*outer_alone, *either))
    if flag == "supports_durable_storage":
        expected = (True, False)
    found = (combined(without, everything), combined(everything, without))
    assert tuple(getattr(flags, flag) for flags in found) == expected


def test_a_cycle(both: Setup, devices: SharedDevices) -> None:
    for _ in range(3):
        report = both.orchestrator.sleep(1)
        assert used(devices) == 0
        assert both.backend.state().asleep_tags() == {"weights", "kv_cache", TAG}
        step = report.steps[0]
        assert step.tags["weights"].released_bytes == WEIGHTS
        # What was offloaded before is not held by the driver a second time.
        assert both.backend.inner.state().tags[TAG].offloaded_bytes < SIZE + WEIGHTS
        assert both.orchestrator.wake_up().serving
        assert used(devices) >= SIZE + WEIGHTS + KV_CACHE
        both.check()


def test_tags_are_woken_as_asked(both: Setup, devices: SharedDevices) -> None:
    both.orchestrator.sleep(1)
    report = both.orchestrator.wake_up(["weights"])
    assert not report.serving
    assert both.backend.state().asleep_tags() == {"kv_cache"}
    both.check()
    assert both.orchestrator.wake_up(["kv_cache"]).serving
    both.orchestrator.sleep(1)
    both.orchestrator.wake_up([TAG])
    assert both.backend.state().asleep_tags() == {"weights", "kv_cache"}
    both.orchestrator.wake_up()
    both.check()


def test_a_release_is_selective(both: Setup, devices: SharedDevices) -> None:
    plan = both.orchestrator.plan_release()
    assert plan.strategy is not None
    assert plan.strategy.value == "selective"
    assert not both.orchestrator.release_kv_cache().degraded
    assert used(devices) < SIZE + WEIGHTS + KV_CACHE
    assert both.engine.named() == ["quiesce", "drop_caches"]
    both.check()
    assert both.orchestrator.sleep(1).changed
    assert both.orchestrator.wake_up().serving
    both.check()


def test_how_deep_a_sleep_goes(both: Setup, devices: SharedDevices) -> None:
    both.backend.suspend(1, depth="memory")
    assert both.residency(TAG) is Residency.RESIDENT
    assert used(devices) >= SIZE
    both.backend.suspend(1, depth="process")
    assert used(devices) == 0
    both.backend.resume()
    both.check()


@pytest.mark.parametrize("by", ["option", "policy"])
def test_a_sleep_at_level_1_stays_shallow(
    devices: SharedDevices, simulator: Simulator, runtime: Path, by: str
) -> None:
    if by == "option":
        setup = Setup(runtime, depth="memory")
    else:
        setup = Setup(runtime, {TAG: {"level_1": "keep", "level_2": "offload"}})
    plan = setup.orchestrator.plan_sleep(1)
    assert not plan.releases_device_context
    setup.orchestrator.sleep(1)
    assert setup.residency(TAG) is Residency.RESIDENT
    assert setup.engine.named() == ["quiesce", "drop_caches"], "communicators are left alone"
    assert setup.orchestrator.wake_up().serving
    if by == "policy":
        assert setup.orchestrator.plan_sleep(2).releases_device_context
        setup.orchestrator.sleep(2)
        assert used(devices) == 0
        setup.orchestrator.wake_up()
    setup.orchestrator.close()


def test_hooks_wait_for_the_context(both: Setup) -> None:
    both.engine.named()
    both.orchestrator.sleep(1)
    assert both.engine.named() == ["quiesce", "teardown_communicators"]
    both.orchestrator.wake_up(["weights"])
    assert both.engine.named() == ["drop_caches", "rebuild_communicators"]
    both.orchestrator.wake_up()
    assert both.engine.named() == ["recapture_graphs", "unquiesce"]


def test_nothing_calls_the_driver_while_the_process_sleeps(both: Setup) -> None:
    """A call would wait for ever."""
    both.orchestrator.sleep(1)
    assert not both.orchestrator.sleep(1).changed
    assert not both.backend.suspend(1).changed
    assert both.orchestrator.state().memory.context_released
    assert not both.orchestrator.plan_sleep(1).changes
    assert both.orchestrator.plan_wake().changes
    assert not both.orchestrator.release_kv_cache().changed
    assert not both.backend.discard(["kv_cache"]).changed
    for call in (lambda: both.backend.stage(), lambda: both.orchestrator.stage()):
        with pytest.raises(SuspendedError):
            call()
    with pytest.raises(PolicyConflictError):
        both.backend.suspend(2)
    with pytest.raises(UnknownTagError):
        both.backend.resume(["typo"])
    both.orchestrator.wake_up()
    both.check()


@pytest.mark.parametrize("depth", ["process", "memory"])
def test_a_process_that_somebody_else_has_woken_is_not_taken_for_asleep(
    devices: SharedDevices, simulator: Simulator, runtime: Path, depth: Depth
) -> None:
    inner = {"runtime_directory": runtime, "device_margin_bytes": 0}
    both = Setup(runtime, checkpoint=inner)
    both.orchestrator.sleep(1)
    assert wake(ME, runtime).changed
    both.backend.suspend(1, depth=depth)
    asleep = depth == "process"
    assert both.orchestrator.state().memory.context_released is asleep
    assert devices.checkpoint_state(ME) == (2 if asleep else 0)
    both.orchestrator.wake_up()
    both.check()
    both.orchestrator.close()


@pytest.mark.parametrize("call", ["free", "allocate"])
def test_a_thread_that_waits_for_the_driver_keeps_nobody_from_waking(
    both: Setup, devices: SharedDevices, call: str
) -> None:
    """It may hold locks that whoever frees and allocates needs."""
    extra = both.backend.allocate("kv_cache", KV_CACHE)
    space = both.backend.outer._space
    calls = {"free": partial(space.free, extra), "allocate": partial(space.allocate, "x", MIB, 0)}
    both.orchestrator.sleep(1)
    seen = [both.orchestrator.state().memory]

    def wake() -> None:
        seen.append(both.orchestrator.state().memory)
        both.orchestrator.wake_up()

    waiting, waking = Thread(target=calls[call]), Thread(target=wake)
    try:
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive(), "its call needs the device"
        waking.start()
        waking.join(20)
        assert not waking.is_alive()
    finally:
        devices.put_state(ME, 0)  # where it fails, all go on
        waiting.join()
        waking.join()
    assert seen[0] == seen[1]
    both.check()
    assert both.residency("weights") is Residency.RESIDENT


def test_a_process_that_cannot_be_locked_leaves_the_memory_asleep(
    devices: SharedDevices, simulator: Simulator, runtime: Path
) -> None:
    inner = {"helper": False, "runtime_directory": runtime, "device_margin_bytes": 0}
    both = Setup(runtime, checkpoint={**inner, "lock_timeout_s": 0.1})
    devices.set_busy(ME, True)
    with pytest.raises(LockTimeoutError) as caught:
        both.orchestrator.sleep(1)
    report = caught.value.report
    assert isinstance(report, TransitionReport)
    assert report.changed
    assert report.tags["weights"].after.offloaded_bytes == WEIGHTS
    assert report.tags[TAG].after.resident_bytes
    assert not both.orchestrator.state().serving
    assert ("drop_caches", frozenset({"kv_cache"})) in both.engine.calls, "it was dropped"
    devices.set_busy(ME, False)
    assert both.orchestrator.wake_up().serving
    both.check()
    both.orchestrator.sleep(1)
    both.orchestrator.wake_up()
    both.orchestrator.close()


def test_what_the_process_would_not_survive_is_refused_first(both: Setup) -> None:
    both.backend.inner.communicators = lambda: ["default"]
    with pytest.raises(CheckpointRefusedError):
        both.orchestrator.sleep(1)
    assert not both.backend.state().asleep_tags()
    assert both.orchestrator.state().serving
    both.orchestrator.sleep(1, policies=_shallow())
    both.orchestrator.wake_up()


def _shallow() -> Any:
    from sleepbackends.policies import Policies, Policy, TagPolicy

    return Policies({TAG: TagPolicy(Policy.KEEP, Policy.KEEP)})


def test_no_room_for_the_tags_leaves_them_asleep(both: Setup, devices: SharedDevices) -> None:
    both.orchestrator.sleep(1)
    devices.set_budget_bytes(SIZE + 4 * MIB)
    with pytest.raises(DeviceMemoryError):
        both.orchestrator.wake_up()
    assert both.backend.state().asleep_tags() == {"weights", "kv_cache"}
    devices.set_budget_bytes(None)
    assert both.orchestrator.wake_up().serving
    both.check()


def test_closing_wakes_the_process_first(both: Setup, devices: SharedDevices) -> None:
    both.orchestrator.sleep(1)
    both.orchestrator.close()
    assert devices.checkpoint_state(ME) == 0
    assert read(both.plain, 5) == b"plain"


def test_closing_without_room_can_be_repeated(both: Setup, devices: SharedDevices) -> None:
    """Whatever the outer backend gives back needs the driver."""
    both.orchestrator.sleep(1)
    devices.set_budget_bytes(SIZE - 1)
    errors: list[Exception] = []

    def close() -> None:
        try:
            both.orchestrator.close()
        except DeviceMemoryError as error:
            errors.append(error)

    closing = Thread(target=close)
    closing.start()
    closing.join(20)
    waits = closing.is_alive()
    if waits:
        devices.put_state(ME, 0)
    closing.join()
    assert not waits
    assert len(errors) == 1
    assert devices.checkpoint_state(ME) == 2
    devices.set_budget_bytes(None)
    both.orchestrator.close()
    assert devices.checkpoint_state(ME) == 0
    assert read(both.plain, 5) == b"plain"


def test_names_that_cannot_be_put_together(
    devices: SharedDevices, simulator: Simulator, runtime: Path
) -> None:
    for name in ("host+", "a+b+c"):
        with pytest.raises(ConfigurationError, match="does not name two"):
            Orchestrator.create(SleepConfig(backend=name))
    with pytest.raises(UnknownBackendError, match="checkpoint"):
        Orchestrator.create(SleepConfig(backend="cumem+chekpoint"))
    with pytest.raises(ConfigurationError, match="does not take the whole process"):
        Orchestrator.create(SleepConfig(backend="cumem+host"))
    wrong: list[dict[str, Any]] = [{"deph": "memory"}, {"depth": "deep"}, {"cumem": {"typo": 1}}]
    for options in wrong:
        with pytest.raises(InvalidOptionsError):
            Orchestrator.create(SleepConfig(backend="cumem+checkpoint", options=options))


def test_an_inner_backend_that_owns_memory_is_refused() -> None:
    outer, inner = SimulatedBackend(), SimulatedBackend()
    assert inner.capabilities == IN_PROCESS
    with pytest.raises(ConfigurationError):
        CompositeBackend(outer, inner)


def test_the_parts_are_there(both: Setup) -> None:
    assert isinstance(both.backend.inner, CheckpointBackend)
    assert both.backend.is_managed(both.weights)
    with pytest.raises(AttributeError):
        both.backend.nothing_of_this_name  # noqa: B018 - the access is the test


def test_the_benchmark_of_many_gpus_measures_both(
    devices: SharedDevices, simulator: Simulator
) -> None:
    spec = Spec("single", "cumem+checkpoint", 2, 0.002, 0.001, 0.5, rounds=2)
    rows, _ = measured(spec)
    check_rows(rows, spec, set(CASES))
