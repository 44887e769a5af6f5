"""One word for where the memory is: what each means, for any tags and policies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from sleepbackends import (
    Block,
    Capabilities,
    HookError,
    Orchestrator,
    Policies,
    Policy,
    PolicyConflictError,
    SleepBackendsError,
    TagPolicy,
)
from sleepbackends.sleep_state import SleepState
from sleepbackends.testing import FaultInjector, SimulatedOptions
from sleepbackends.testing.simulated import ALL
from tests.gated import Gate, make

AWAKE, RELEASED = SleepState.AWAKE, SleepState.KV_CACHE_RELEASED
OFFLOADED, DISCARDED = SleepState.WEIGHTS_OFFLOADED, SleepState.DISCARD_ALL
UNSELECTIVE = replace(ALL, supports_selective_release=False)
NEITHER = replace(UNSELECTIVE, supports_selective_resume=False)


def test_the_levels_have_the_names_vllm_gives_them() -> None:
    orchestrator, _, _ = make()
    assert orchestrator.state().sleep_state is AWAKE
    orchestrator.sleep(0)
    assert orchestrator.state().sleep_state is AWAKE
    orchestrator.sleep(1)
    assert orchestrator.state().sleep_state is OFFLOADED
    orchestrator.wake_up({"weights", "lora"})
    assert orchestrator.state().sleep_state is OFFLOADED, "the KV cache is still asleep"
    orchestrator.wake_up()
    assert orchestrator.state().sleep_state is AWAKE
    orchestrator.sleep(2)
    assert orchestrator.state().sleep_state is DISCARDED
    orchestrator.wake_up()
    assert orchestrator.state().sleep_state is AWAKE, "the hook has reloaded the weights"


@pytest.mark.parametrize("capabilities", [ALL, UNSELECTIVE])
def test_a_release_that_happened(capabilities: Capabilities) -> None:
    orchestrator, _, _ = make(SimulatedOptions(capabilities))
    for _ in range(2):
        orchestrator.release_kv_cache()
        assert orchestrator.state().sleep_state is RELEASED
        assert not orchestrator.release_kv_cache().changed
        assert orchestrator.state().sleep_state is RELEASED, "a repeated one changes nothing"
        orchestrator.wake_up()
        assert orchestrator.state().sleep_state is AWAKE
    orchestrator.release_kv_cache()
    orchestrator.sleep(1)
    assert orchestrator.state().sleep_state is OFFLOADED
    orchestrator.wake_up({"weights", "lora"})
    assert orchestrator.state().sleep_state is RELEASED, "it has not been mapped since"


def test_a_release_is_over_when_its_memory_was_mapped_again() -> None:
    orchestrator, backend, _ = make()
    orchestrator.release_kv_cache()
    orchestrator.wake_up()
    orchestrator.sleep(1)
    orchestrator.wake_up({"weights", "lora"})
    assert orchestrator.state().sleep_state is OFFLOADED, "this time a sleep dropped it"
    orchestrator.wake_up()
    orchestrator.release_kv_cache()
    with backend.region("kv_cache") as region:
        region.buffer(10)
    assert orchestrator.state().sleep_state is OFFLOADED, "some of it is there"


def test_a_release_of_everything_is_named_by_what_it_left() -> None:
    orchestrator, _, _ = make(SimulatedOptions(NEITHER))
    assert orchestrator.release_kv_cache().degraded
    assert orchestrator.state().sleep_state is OFFLOADED


def test_a_release_after_a_sleep_has_released_nothing() -> None:
    orchestrator, _, _ = make()
    orchestrator.sleep(1)
    assert not orchestrator.release_kv_cache().changed
    assert orchestrator.state().sleep_state is OFFLOADED
    orchestrator.wake_up({"weights", "lora"})
    assert orchestrator.state().sleep_state is OFFLOADED


def test_a_refused_release_changes_nothing() -> None:
    orchestrator, _, _ = make(policies={"kv_cache": TagPolicy(Policy.KEEP, Policy.KEEP)})
    with pytest.raises(PolicyConflictError):
        orchestrator.release_kv_cache()
    assert orchestrator.state().sleep_state is AWAKE


@contextmanager
def two_kv_blocks(failing: int) -> Iterator[Orchestrator]:
    orchestrator, backend, _ = make()
    with backend.region("kv_cache") as region:
        region.buffer(10)
    with FaultInjector(backend, {"unmap": [failing]}), pytest.raises(SleepBackendsError):
        orchestrator.release_kv_cache()
    yield orchestrator


def test_a_release_that_failed_has_not_happened_until_it_is_repeated() -> None:
    with two_kv_blocks(failing=0) as orchestrator:
        assert orchestrator.state().sleep_state is AWAKE
    with two_kv_blocks(failing=1) as orchestrator:
        assert orchestrator.state().sleep_state is OFFLOADED, "half of it is gone"
        orchestrator.release_kv_cache()
        assert orchestrator.state().sleep_state is RELEASED


def test_a_hook_that_raises_does_not_bring_the_memory_back() -> None:
    orchestrator, _, engine = make()
    engine.fail["drop_caches"] = RuntimeError("no")
    with pytest.raises(HookError):
        orchestrator.release_kv_cache()
    assert orchestrator.state().sleep_state is RELEASED


def test_contents_that_have_to_be_reloaded_come_first() -> None:
    orchestrator, _, engine = make()
    orchestrator.release({"kv_cache", "weights"})
    assert orchestrator.state().sleep_state is DISCARDED
    without_reload = Orchestrator(orchestrator.backend, hooks=engine.hooks("reload"))
    without_reload.sleep(0)
    without_reload.wake_up()
    assert without_reload.state().sleep_state is DISCARDED, "mapped, but not filled"
    without_reload.mark_valid({"weights"})
    assert without_reload.state().sleep_state is AWAKE


def test_policies_decide_what_has_to_be_reloaded_not_names() -> None:
    keep = TagPolicy(Policy.KEEP, Policy.KEEP)
    drop = TagPolicy(Policy.DISCARD, Policy.DISCARD)
    orchestrator, _, _ = make(policies={"weights": keep, "lora": drop})
    orchestrator.sleep(2)
    assert orchestrator.state().sleep_state is OFFLOADED, "nothing is lost that has to come back"
    orchestrator.wake_up()
    orchestrator.release({"lora", "kv_cache"})
    assert orchestrator.state().sleep_state is RELEASED
    orchestrator.wake_up({"kv_cache"})
    assert orchestrator.state().sleep_state is OFFLOADED, "the KV cache is back, lora is not"
    orchestrator.wake_up()
    orchestrator.sleep(1, policies=Policies({"lora": keep}))
    assert orchestrator.state().sleep_state is OFFLOADED


def test_a_release_does_not_count_before_it_is_done() -> None:
    orchestrator, backend, _ = make()
    with backend.region("kv_cache") as region:
        region.buffer(10)
    gate, unmap = Gate(), backend.unmap
    unmapped: list[Block] = []

    def slow(block: Block) -> None:
        if unmapped:
            gate.pass_through()
        unmapped.append(block)
        unmap(block)

    backend.unmap = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=orchestrator.release_kv_cache)
    thread.start()
    assert gate.reached.wait(30)
    meanwhile = orchestrator.state()
    gate.open.set()
    thread.join(30)
    assert meanwhile.memory.asleep_tags() == {"kv_cache"}
    assert meanwhile.sleep_state is AWAKE
    assert orchestrator.state().sleep_state is RELEASED
