"""Release on backends that cannot release selectively, and every capability's reader."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sleepbackends import (
    Capabilities,
    DeviceMemoryError,
    MechanismError,
    Orchestrator,
    PolicyConflictError,
    ReleaseStrategy,
    Residency,
    SleepConfig,
    Status,
    UnsupportedOperationError,
)
from sleepbackends.testing import (
    FakeEngine,
    FaultInjector,
    SimulatedBackend,
    SimulatedOptions,
)
from sleepbackends.testing.simulated import ALL

SIZE = 1000
UNSELECTIVE = replace(ALL, supports_selective_release=False)
ALL_OR_NOTHING = replace(UNSELECTIVE, supports_selective_resume=False)


def make(
    capabilities: Capabilities, *without: str, **config: Any
) -> tuple[Orchestrator, FakeEngine, dict[str, Any]]:
    engine = FakeEngine()
    sleep_config = SleepConfig(**config)
    backend = SimulatedBackend(SimulatedOptions(capabilities), sleep_config.settings)
    memory = {}
    for tag in ("weights", "kv_cache"):
        with backend.region(tag) as region:
            memory[tag] = region.buffer(SIZE)
        memory[tag].write(tag[:1].encode() * SIZE)
    return Orchestrator(backend, config=sleep_config, hooks=engine.hooks(*without)), engine, memory


def residency(orchestrator: Orchestrator, tag: str) -> Residency:
    (only,) = orchestrator.state().memory.tags[tag].residencies
    return only


def test_suspend_and_reload() -> None:
    orchestrator, engine, memory = make(UNSELECTIVE)
    plan = orchestrator.plan_release()
    assert plan.strategy is ReleaseStrategy.SUSPEND_AND_RELOAD
    assert not plan.degraded
    assert plan.host_bytes_needed == SIZE
    report = orchestrator.release_kv_cache()
    assert report.strategy is plan.strategy
    assert report.reason == plan.reason
    assert [step.operation for step in report.steps] == ["suspend", "resume"]
    assert residency(orchestrator, "kv_cache") is Residency.DISCARDED
    assert residency(orchestrator, "weights") is Residency.RESIDENT
    with orchestrator.use({"weights"}):
        assert memory["weights"].read() == b"w" * SIZE
    assert engine.calls[-1] == ("drop_caches", frozenset({"kv_cache"}))
    assert not orchestrator.release_kv_cache().changed
    assert orchestrator.wake_up().serving
    assert memory["kv_cache"].read() == bytes(SIZE)


def test_full_suspend_is_degraded() -> None:
    orchestrator, engine, memory = make(ALL_OR_NOTHING)
    plan = orchestrator.plan_release()
    assert plan.strategy is ReleaseStrategy.FULL_SUSPEND
    assert plan.degraded
    report = orchestrator.release_kv_cache()
    assert report.degraded
    assert "wake_up" in report.reason
    assert residency(orchestrator, "weights") is Residency.OFFLOADED
    assert orchestrator.state().status is Status.ASLEEP
    assert not orchestrator.release_kv_cache().degraded, "nothing was done the second time"
    with pytest.raises(UnsupportedOperationError, match="supports_selective_resume"):
        orchestrator.wake_up(["weights"])
    assert orchestrator.wake_up().serving
    assert memory["weights"].read() == b"w" * SIZE
    assert memory["kv_cache"].read() == bytes(SIZE)
    assert ("reload", frozenset({"weights"})) not in engine.calls


@pytest.mark.parametrize(
    ("capabilities", "on_unselective", "allowed"),
    [
        (ALL, "error", True),
        (UNSELECTIVE, "error", False),
        (UNSELECTIVE, "reload_only", True),
        (ALL_OR_NOTHING, "reload_only", False),
        (ALL_OR_NOTHING, "fallback", True),
    ],
)
def test_on_unselective(capabilities: Capabilities, on_unselective: str, allowed: bool) -> None:
    orchestrator, engine, memory = make(capabilities, on_unselective=on_unselective)
    if allowed:
        assert orchestrator.release_kv_cache().changed
        return
    before = orchestrator.state()
    for call in (orchestrator.plan_release, orchestrator.release_kv_cache):
        with pytest.raises(UnsupportedOperationError, match=on_unselective) as caught:
            call()
        assert "fallback" in caught.value.hint
    assert orchestrator.state() == before
    assert engine.named() == []
    assert memory["kv_cache"].read() == b"k" * SIZE


def test_a_kept_tag_cannot_be_released_by_any_strategy() -> None:
    for capabilities in (ALL, UNSELECTIVE, ALL_OR_NOTHING):
        orchestrator, _, memory = make(capabilities, policies={"kv_cache": "keep"})
        with pytest.raises(PolicyConflictError, match="keep"):
            orchestrator.release_kv_cache()
        assert memory["kv_cache"].read() == b"k" * SIZE


def test_release_of_a_tag_whose_policy_saves_it() -> None:
    for capabilities in (ALL, UNSELECTIVE, ALL_OR_NOTHING):
        orchestrator, _, memory = make(capabilities, policies={"kv_cache": "offload"})
        orchestrator.release_kv_cache()
        assert residency(orchestrator, "kv_cache") is Residency.DISCARDED, "released, not saved"
        orchestrator.wake_up()
        assert memory["kv_cache"].read() == bytes(SIZE)
        assert memory["weights"].read() == b"w" * SIZE


def test_a_second_release_after_the_first() -> None:
    orchestrator, _, memory = make(UNSELECTIVE)
    for tag in ("lora", "adapters"):
        with orchestrator.backend.region(tag) as region:  # type: ignore[attr-defined]
            region.buffer(SIZE)
    orchestrator.release(["lora"])
    orchestrator.release(["kv_cache"])
    tags = orchestrator.state().memory.tags
    assert tags["lora"].discarded_bytes == tags["kv_cache"].discarded_bytes == SIZE
    assert tags["weights"].resident_bytes == tags["adapters"].resident_bytes == SIZE
    assert memory["weights"].read() == b"w" * SIZE


def test_release_leaves_sleeping_tags_asleep() -> None:
    orchestrator, _, _ = make(UNSELECTIVE)
    with orchestrator.backend.region("lora") as region:  # type: ignore[attr-defined]
        region.buffer(SIZE)
    orchestrator.sleep(1)
    orchestrator.wake_up(["kv_cache", "weights"])
    orchestrator.release_kv_cache()
    assert residency(orchestrator, "lora") is Residency.OFFLOADED
    assert residency(orchestrator, "weights") is Residency.RESIDENT


def test_without_offload_contents_are_reloaded_or_the_release_is_refused() -> None:
    capabilities = replace(UNSELECTIVE, supports_offload=False)
    orchestrator, engine, _ = make(capabilities)
    with pytest.raises(UnsupportedOperationError, match="supports_offload"):
        orchestrator.sleep(1)
    assert orchestrator.state().serving
    assert orchestrator.plan_release().reload_tags == {"weights"}
    orchestrator.release_kv_cache()
    assert ("reload", frozenset({"weights"})) in engine.calls
    assert residency(orchestrator, "weights") is Residency.RESIDENT

    orchestrator, engine, memory = make(capabilities, "reload")
    for call in (orchestrator.plan_release, orchestrator.release_kv_cache):
        with pytest.raises(UnsupportedOperationError, match="reload"):
            call()
    assert memory["weights"].read() == b"w" * SIZE
    assert engine.named() == []


def test_reload_fails_half_way() -> None:
    """Everything is asleep with its bytes saved; waking puts it right."""
    orchestrator, _, memory = make(UNSELECTIVE)
    backend: Any = orchestrator.backend
    with FaultInjector(backend, {"restore": [0]}), pytest.raises(MechanismError) as caught:
        orchestrator.release_kv_cache()
    assert caught.value.recoverable
    assert residency(orchestrator, "weights") is Residency.OFFLOADED
    assert not orchestrator.state().serving
    assert orchestrator.wake_up().serving
    assert memory["weights"].read() == b"w" * SIZE


def test_a_failed_suspend_serves_on() -> None:
    for capabilities in (ALL, UNSELECTIVE, ALL_OR_NOTHING):
        orchestrator, engine, memory = make(capabilities)
        backend: Any = orchestrator.backend
        with FaultInjector(backend, {"save": [0]}), pytest.raises(MechanismError):
            orchestrator.sleep(1)
        assert engine.named() == ["quiesce", "unquiesce"]
        assert orchestrator.state().status is Status.AWAKE
        assert memory["kv_cache"].read() == b"k" * SIZE


def test_no_room_to_wake_stays_asleep_and_can_be_retried() -> None:
    orchestrator, engine, memory = make(ALL)
    orchestrator.sleep(1)
    backend: Any = orchestrator.backend
    backend.device.budget_bytes = SIZE
    engine.calls.clear()
    with pytest.raises(DeviceMemoryError) as caught:
        orchestrator.wake_up()
    assert caught.value.needed_bytes == 2 * SIZE
    assert orchestrator.state().status is Status.ASLEEP
    assert engine.named() == []
    backend.device.budget_bytes = 10 * SIZE
    assert orchestrator.wake_up().serving
    assert memory["weights"].read() == b"w" * SIZE


# One row a flag: what the orchestrator asks of the engine when it is False.
HOOKS_OF_FLAGS = {
    "preserves_communicators": [
        "quiesce", "teardown_communicators", "drop_caches", "rebuild_communicators", "unquiesce"
    ],
    "preserves_compiled_artifacts": ["quiesce", "drop_caches", "recompile", "unquiesce"],
    "preserves_addresses": ["quiesce", "drop_caches", "recapture_graphs", "unquiesce"],
    "preserves_graphs_with_communicators": [
        "quiesce", "drop_caches", "recapture_graphs", "unquiesce"
    ],
}  # fmt: skip


@pytest.mark.parametrize("flag", HOOKS_OF_FLAGS)
def test_hooks_that_a_flag_asks_for(flag: str) -> None:
    orchestrator, engine, _ = make(replace(ALL, **{flag: False}))
    orchestrator.sleep(1)
    orchestrator.wake_up()
    recaptures = [call[1] for call in engine.calls if call[0] == "recapture_graphs"]
    assert recaptures in ([], [flag != "preserves_addresses"])
    assert engine.named() == HOOKS_OF_FLAGS[flag]


def test_no_hook_is_asked_for_where_everything_survives() -> None:
    orchestrator, engine, _ = make(ALL)
    orchestrator.sleep(1)
    orchestrator.wake_up()
    assert engine.named() == ["quiesce", "drop_caches", "unquiesce"]


def test_a_selective_release_disturbs_neither_communicators_nor_graphs() -> None:
    fragile = replace(ALL, preserves_communicators=False, preserves_compiled_artifacts=False)
    orchestrator, engine, _ = make(fragile)
    orchestrator.release_kv_cache()
    orchestrator.wake_up()
    assert engine.named() == ["quiesce", "drop_caches", "unquiesce"]


def test_hooks_wait_for_a_device_context_that_is_gone() -> None:
    orchestrator, engine, _ = make(replace(ALL_OR_NOTHING, releases_device_context=True))
    assert orchestrator.plan_sleep(1).releases_device_context
    orchestrator.sleep(1)
    assert engine.named() == ["quiesce"]
    assert orchestrator.state().pending_hooks == ("drop_caches",)
    orchestrator.wake_up()
    assert engine.named() == ["drop_caches", "unquiesce"]


def test_durable_storage_is_in_the_plan() -> None:
    for durable in (True, False):
        orchestrator, _, _ = make(replace(ALL, supports_durable_storage=durable))
        assert orchestrator.plan_sleep(1).survives_exit is durable


def test_a_process_level_backend_knows_tags_it_does_not_hold() -> None:
    """It has one block, the process; released tags are those the policies declare."""
    engine = FakeEngine()
    backend = SimulatedBackend(SimulatedOptions(replace(ALL_OR_NOTHING, owns_allocations=False)))
    with backend.region("process") as region:
        process = region.buffer(SIZE)
    process.write(b"p" * SIZE)
    orchestrator = Orchestrator(backend, hooks=engine.hooks())
    assert orchestrator.plan_release().strategy is ReleaseStrategy.FULL_SUSPEND
    report = orchestrator.release_kv_cache()
    assert report.degraded
    assert backend.mapped_bytes == 0
    assert ("drop_caches", frozenset({"kv_cache"})) in engine.calls
    assert orchestrator.wake_up().serving
    assert process.read() == b"p" * SIZE
