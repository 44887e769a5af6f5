"""Backends written for vLLM's interface, in our orchestrator."""

from __future__ import annotations

from typing import Any

import pytest

from sleepbackends.adapters.vllm.backend_adapter import Known, VllmBackendAdapter
from sleepbackends.config import SleepConfig
from sleepbackends.control import Control
from sleepbackends.engine import EngineHooks
from sleepbackends.engine_state import Status
from sleepbackends.errors import (
    BackendUnavailableError,
    ClosedError,
    InvalidLevelError,
    MechanismError,
    PolicyConflictError,
    RequestError,
    TransitionTimeoutError,
    UnknownTagError,
    UnsupportedOperationError,
)
from sleepbackends.fallback import ReleaseStrategy
from sleepbackends.orchestrator import Orchestrator
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.protocol import API_VERSION, SleepModeBackend
from sleepbackends.residency import Residency
from tests.adapters.vllm.released import ReleasedVllm

SIZES = {"weights": 1000, "kv_cache": 300}


class Written:
    """A class as its author would write it, but for the base, which the release brings."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.failing = False

    def _call(self, *call: Any) -> None:
        self.calls.append(call)
        if self.failing:
            raise RuntimeError("the driver said no")

    def suspend(self, level: int = 1) -> None:
        self._call("suspend", level)

    def resume(self, tags: list[str] | None = None) -> None:
        self._call("resume", tags)


class Selective(Written):
    def discard(self, tags: tuple[str, ...]) -> None:
        self._call("discard", tags)

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True

    @classmethod
    def supports_durable_storage(cls) -> bool:
        return True


def written(vllm: ReleasedVllm, by: type = Written, **known: Any) -> VllmBackendAdapter:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend as Interface

    cls = type("Theirs", (by, Interface), {})
    return VllmBackendAdapter(cls(), Known(sizes_bytes=SIZES, **known))


def calls(adapter: VllmBackendAdapter) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = adapter._backend.calls
    return found


def residencies(adapter: VllmBackendAdapter) -> dict[str, Residency]:
    return {tag: next(iter(each.residencies)) for tag, each in adapter.state().tags.items()}


def test_capabilities_are_what_it_says_and_implements(vllm: ReleasedVllm) -> None:
    adapter: SleepModeBackend = written(vllm)
    assert adapter.name == "Theirs"
    assert adapter.api_version == API_VERSION
    assert adapter.capabilities.supported() == ("supports_offload", "preserves_addresses")
    selective = written(vllm, Selective, releases_device_context=True).capabilities
    assert set(selective.supported()) == {
        "supports_selective_release",
        "supports_offload",
        "preserves_addresses",
        "preserves_communicators",
        "supports_durable_storage",
        "releases_device_context",
    }
    assert written(vllm, supports_selective_resume=True).capabilities.supports_selective_resume


def test_vllm_s_own_class_is_read_rightly(vllm: ReleasedVllm) -> None:
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    capabilities = VllmBackendAdapter(CuMemBackend()).capabilities
    assert capabilities.supports_selective_release is ("discard" in vars(CuMemBackend))
    assert capabilities.preserves_communicators


def test_sleep_and_wake(vllm: ReleasedVllm) -> None:
    adapter = written(vllm)
    report = adapter.suspend(1)
    assert report.released_bytes == sum(SIZES.values())
    assert report.dropped_tags == {"kv_cache"}
    assert residencies(adapter) == {
        "weights": Residency.OFFLOADED,
        "kv_cache": Residency.DISCARDED,
    }
    assert not adapter.suspend(1).changed
    assert adapter.resume().undefined_tags == {"kv_cache"}
    assert not adapter.resume().changed
    adapter.mark_valid(["kv_cache"])
    assert not adapter.state().unusable_tags()
    assert not adapter.suspend(0).changed
    assert calls(adapter) == [("suspend", 1), ("resume", None)]


def test_level_2_drops_the_weights(vllm: ReleasedVllm) -> None:
    adapter = written(vllm)
    assert adapter.suspend(2).dropped_tags == {"weights", "kv_cache"}
    adapter.resume()
    assert residencies(adapter) == dict.fromkeys(SIZES, Residency.UNDEFINED)
    assert calls(adapter)[0] == ("suspend", 2)


def test_policies_decide_what_becomes_of_the_weights(vllm: ReleasedVllm) -> None:
    adapter = written(vllm)
    kept = TagPolicy(Policy.OFFLOAD, Policy.OFFLOAD)
    adapter.suspend(2, policies=Policies({"weights": kept}))
    assert calls(adapter) == [("suspend", 1)], "vLLM's level 1 is what keeps them"
    assert residencies(adapter)["weights"] is Residency.OFFLOADED


def test_what_the_interface_does_not_promise_is_refused(vllm: ReleasedVllm) -> None:
    adapter = written(vllm)
    keep, offload = (TagPolicy(p, p) for p in (Policy.KEEP, Policy.OFFLOAD))
    with pytest.raises(PolicyConflictError, match="weights"):
        adapter.suspend(1, policies=Policies({"weights": keep}))
    with pytest.raises(UnsupportedOperationError, match="keeps the KV cache"):
        adapter.suspend(1, policies=Policies({"kv_cache": offload}))
    with pytest.raises(InvalidLevelError):
        adapter.suspend(3)
    with pytest.raises(UnknownTagError, match="runtime"):
        adapter.resume(["runtime"])
    with pytest.raises(UnsupportedOperationError, match="supports_selective_release"):
        adapter.discard(["kv_cache"])
    with pytest.raises(TransitionTimeoutError):
        adapter.suspend(1, control=_expired())
    assert calls(adapter) == []
    adapter.suspend(1)
    with pytest.raises(PolicyConflictError, match="'weights'"):
        adapter.suspend(2)
    with pytest.raises(PolicyConflictError, match="cannot mark valid"):
        adapter.mark_valid(["kv_cache", "weights"])
    with pytest.raises(UnsupportedOperationError, match="supports_selective_resume"):
        adapter.resume(["weights"])
    assert calls(adapter) == [("suspend", 1)]


def _expired() -> Control:
    return Control(timeout_s=1e-9)


def test_parts_where_its_author_vouches_for_them(vllm: ReleasedVllm) -> None:
    adapter = written(vllm, Selective, supports_selective_resume=True)
    adapter.discard(["kv_cache"])
    assert not adapter.discard(["kv_cache"]).changed
    adapter.suspend(1)
    adapter.resume(["weights"])
    assert adapter.state().asleep_tags() == {"kv_cache"}
    adapter.resume(["weights", "kv_cache"])
    assert calls(adapter) == [
        ("discard", ("kv_cache",)),
        ("suspend", 1),
        ("resume", ["weights"]),
        ("resume", None),
    ]
    for tags in (["kv_cache"], ["kv_cache", "weights"]):
        adapter.discard(tags)
    assert calls(adapter)[-2:] == [("discard", ("kv_cache",)), ("discard", ("weights",))]


@pytest.mark.parametrize("level", [1, 2])
def test_after_a_failed_suspend_nothing_is_taken_for_granted(
    vllm: ReleasedVllm, level: int
) -> None:
    adapter = written(vllm)
    adapter._backend.failing = True
    with pytest.raises(MechanismError, match="the driver said no") as caught:
        adapter.suspend(level)
    assert caught.value.backend == "Theirs"
    assert caught.value.report.changed
    assert adapter.state().asleep_tags() == set(SIZES)
    for _ in range(2):
        with pytest.raises(MechanismError):
            adapter.resume()
        assert adapter.state().asleep_tags() == set(SIZES)
    adapter._backend.failing = False
    assert adapter.resume().changed
    assert residencies(adapter)["kv_cache"] is Residency.UNDEFINED


def test_a_failed_discard(vllm: ReleasedVllm) -> None:
    adapter = written(vllm, Selective)
    adapter._backend.failing = True
    with pytest.raises(MechanismError):
        adapter.discard(["kv_cache"])
    assert adapter.state().asleep_tags() == {"kv_cache"}


def test_in_an_orchestrator(vllm: ReleasedVllm) -> None:
    done: list[Any] = []
    hooks = EngineHooks(
        drop_caches=lambda tags: done.append(("drop_caches", set(tags))),
        reload=lambda tags: done.append(("reload", set(tags))),
        rebuild_communicators=lambda: done.append("rebuild"),
        recompile=lambda: done.append("recompile"),
        recapture_graphs=lambda only: done.append(("recapture", only)),
    )
    adapter = written(vllm)
    with Orchestrator(adapter, hooks=hooks) as orchestrator:
        orchestrator.sleep(2)
        assert orchestrator.state().status is Status.ASLEEP
        orchestrator.wake_up()
        assert orchestrator.state().status is Status.AWAKE
        assert done == [
            ("drop_caches", {"weights", "kv_cache"}),
            "rebuild",
            ("reload", {"weights"}),
            "recompile",
            ("recapture", True),
        ]
        adapter._backend.failing = True
        with pytest.raises(MechanismError):
            orchestrator.sleep(1)
        assert not orchestrator.state().serving, "memory may be gone"
        adapter._backend.failing = False
        orchestrator.wake_up()
        assert orchestrator.state().serving
    with pytest.raises(ClosedError):
        adapter.suspend(1)


@pytest.mark.parametrize(
    ("by", "known", "strategy"),
    [
        (Selective, {}, ReleaseStrategy.SELECTIVE),
        (Written, {"supports_selective_resume": True}, ReleaseStrategy.SUSPEND_AND_RELOAD),
        (Written, {}, ReleaseStrategy.FULL_SUSPEND),
    ],
)
def test_a_release_finds_a_way(
    vllm: ReleasedVllm, by: type, known: dict[str, bool], strategy: ReleaseStrategy
) -> None:
    with Orchestrator(written(vllm, by, **known), config=SleepConfig()) as orchestrator:
        report = orchestrator.release_kv_cache()
        assert report.strategy is strategy
        assert "kv_cache" in orchestrator.backend.state().asleep_tags()
        orchestrator.wake_up()
        assert orchestrator.state().serving


def test_a_size_nobody_knows_still_shows_where_a_tag_is() -> None:
    adapter = VllmBackendAdapter(Written(), name="theirs")
    assert adapter.state().tags["weights"].resident_bytes == 1
    assert adapter.name == "theirs"


def test_what_is_no_backend_is_refused() -> None:
    with pytest.raises(RequestError, match="no suspend and no resume"):
        VllmBackendAdapter(object())

    class Unsupported(Written):
        @classmethod
        def is_supported(cls) -> bool:
            return False

    with pytest.raises(BackendUnavailableError, match="Unsupported"):
        VllmBackendAdapter(Unsupported())
