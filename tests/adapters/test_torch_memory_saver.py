"""Regions, pauses and resumes by tag, with the interface of torch_memory_saver."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from sleepbackends.adapters.torch_memory_saver import TorchMemorySaver
from sleepbackends.adapters.torch_memory_saver.tags import PausePolicies, backend_tag
from sleepbackends.errors import (
    ConfigurationError,
    DeviceMemoryError,
    HostMemoryError,
    PolicyConflictError,
    RequestError,
)
from sleepbackends.policies import LEVELS, Policy
from tests.adapters.tms import (
    SIZE_BYTES,
    MakeSaver,
    filled,
    holds,
    make_saver,
    resident,
    saver,
    state,
)
from tests.native.fixtures import DEVICES, GRANULE_BYTES, kernel_images, native_library, simulator
from tests.simulators.cuda import Simulator

__all__ = ["kernel_images", "make_saver", "native_library", "saver", "simulator"]


def test_only_what_has_a_backup_keeps_its_contents(
    simulator: Simulator, saver: TorchMemorySaver
) -> None:
    """One tag, the default one, may have memory of both kinds."""
    kept = filled(saver, 10, enable_cpu_backup=True)
    dropped = filled(saver, 20)
    report = saver.pause()
    assert report.copied_bytes == kept.size_bytes
    assert resident(simulator) == 0
    saver.resume()
    assert holds(kept, 10)
    assert holds(dropped, 0)
    dropped.write(b"\x15" * dropped.size_bytes)
    kept.write(b"\x0b" * kept.size_bytes)
    saver.pause()
    saver.resume()
    assert holds(kept, 11), "a later pause keeps what was written since"
    assert holds(dropped, 0)


def test_tags_are_paused_and_resumed_in_any_order(
    simulator: Simulator, saver: TorchMemorySaver
) -> None:
    first = filled(saver, 1, tag="type1", enable_cpu_backup=True)
    second = filled(saver, 2, tag="type2", enable_cpu_backup=True)
    saver.pause("type1")
    assert holds(second, 2)
    assert resident(simulator) == 1
    saver.pause("type2")
    saver.resume("type2")
    assert holds(second, 2)
    saver.resume(tag="type1")
    assert holds(first, 1)
    for _ in range(2):
        saver.pause("type1")
        saver.resume("type1")
    assert holds(first, 1)


def test_all_of_them_means_the_rest_where_some_are_already_so(
    simulator: Simulator, saver: TorchMemorySaver
) -> None:
    weights = filled(saver, 1, tag="weights", enable_cpu_backup=True)
    cache = filled(saver, 2, tag="kv_cache")
    saver.pause("kv_cache")
    saver.pause()
    assert resident(simulator) == 0
    saver.resume("weights")
    assert holds(weights, 1)
    saver.resume()
    assert holds(weights, 1)
    assert holds(cache, 0)


def test_what_was_allocated_while_its_tag_was_paused_stays(saver: TorchMemorySaver) -> None:
    before = filled(saver, 1, tag="weights", enable_cpu_backup=True)
    saver.pause("weights")
    meanwhile = filled(saver, 2, tag="weights", enable_cpu_backup=True)
    saver.resume("weights")
    assert holds(before, 1)
    assert holds(meanwhile, 2)


Misuse = Callable[[TorchMemorySaver], object]


def pause_twice(saver: TorchMemorySaver) -> None:
    saver.pause()
    saver.pause()


def pause_a_tag_twice(saver: TorchMemorySaver) -> None:
    saver.pause("weights")
    saver.pause("weights")


def resume_the_other_tag(saver: TorchMemorySaver) -> None:
    saver.pause("weights")
    saver.resume("kv_cache")


@pytest.mark.parametrize(
    "misuse", [pause_twice, pause_a_tag_twice, resume_the_other_tag, TorchMemorySaver.resume]
)
def test_misuse_is_an_error_and_changes_nothing(
    simulator: Simulator, saver: TorchMemorySaver, misuse: Misuse
) -> None:
    weights = filled(saver, 1, tag="weights", enable_cpu_backup=True)
    cache = filled(saver, 2, tag="kv_cache")
    with pytest.raises(PolicyConflictError, match="paused") as caught:
        misuse(saver)
    assert caught.value.hint
    asleep = len(state(saver).asleep_tags())
    assert resident(simulator) == 2 - asleep
    if asleep:
        saver.resume()
    assert holds(weights, 1)
    assert holds(cache, 0 if misuse is pause_twice else 2)


@pytest.mark.parametrize("tag", ["cuda_graph", None])
def test_where_nothing_is_allocated_nothing_happens(
    saver: TorchMemorySaver, tag: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines pause all the tags they know, whether or not they use them."""
    if tag:
        filled(saver, 2, tag="weights")
    caplog.set_level(logging.INFO, logger="sleepbackends.adapters")
    assert not saver.pause(tag).changed
    assert not saver.resume(tag).changed
    assert [record.levelname for record in caplog.records] == ["INFO"] * 2
    filled(saver, 1, tag="cuda_graph").free()
    assert not saver.pause(tag).changed


@pytest.mark.parametrize("tag", ["two words", "größe", "a:b", "%20", "a/b", ""])
def test_any_text_is_a_tag_of_its_own(saver: TorchMemorySaver, tag: str) -> None:
    memory = filled(saver, 1, tag=tag, enable_cpu_backup=True)
    others = [
        filled(saver, 2, tag=other, enable_cpu_backup=True) for other in (tag + "x", " ", "offload")
    ]
    saver.pause(tag)
    if tag:
        assert all(holds(other, 2) for other in others)
    saver.resume(tag)
    assert holds(memory, 1)
    assert all(holds(other, 2) for other in others)


def test_no_text_means_all_tags(simulator: Simulator, saver: TorchMemorySaver) -> None:
    filled(saver, 1, tag="weights")
    saver.pause("")
    assert resident(simulator) == 0


def test_regions_nest_and_the_innermost_counts(saver: TorchMemorySaver) -> None:
    with saver.region(tag="outer", enable_cpu_backup=True) as outer:
        with saver.region(tag="inner") as inner:
            dropped = inner.buffer(SIZE_BYTES)
        kept = outer.buffer(SIZE_BYTES)
    kept.write(b"\1" * SIZE_BYTES)
    dropped.write(b"\2" * SIZE_BYTES)
    saver.pause("inner")
    assert holds(kept, 1)
    saver.pause("outer")
    saver.resume()
    assert holds(kept, 1)
    assert holds(dropped, 0)


def test_several_devices(simulator: Simulator, saver: TorchMemorySaver) -> None:
    memory = []
    for device in range(DEVICES):
        tag = backend_tag("default", enable_cpu_backup=True)
        with saver.backend.region(tag, device) as region:
            memory.append(region.buffer(SIZE_BYTES))
        memory[-1].write(bytes([device + 1]) * SIZE_BYTES)
    saver.pause()
    assert [resident(simulator, device) for device in range(DEVICES)] == [0, 0]
    saver.resume()
    assert all(holds(each, device + 1) for device, each in enumerate(memory))


def test_savers_do_not_meet(make_saver: MakeSaver) -> None:
    one, two = make_saver(), make_saver()
    ours, theirs = (filled(saver, i, enable_cpu_backup=True) for i, saver in enumerate((one, two)))
    one.pause()
    assert holds(theirs, 1)
    assert not state(two).asleep_bytes
    two.pause()
    one.resume()
    assert holds(ours, 0)
    two.resume()
    assert holds(theirs, 1)


def test_other_tags_of_the_backend_are_left_alone(saver: TorchMemorySaver) -> None:
    filled(saver, 1)
    for tag in ("weights", "offload"):
        saver.backend.allocate(tag, SIZE_BYTES)
    saver.pause()
    assert state(saver).asleep_tags() == {backend_tag("default", enable_cpu_backup=False)}
    saver.resume()


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("selected", [None, "", "kv_cache"])
def test_what_nobody_declared_stays(level: int, selected: str | None) -> None:
    """A tag may appear between the choice of the tags and the suspend."""
    policies = PausePolicies(tag=selected)
    assert policies.at("weights", level) is Policy.KEEP
    assert policies.at("keep:kv_cache", level) is Policy.KEEP
    assert policies.at(backend_tag("kv_cache", enable_cpu_backup=True), level) is Policy.OFFLOAD
    assert policies.at(backend_tag("kv_cache", enable_cpu_backup=False), level) is Policy.DISCARD
    other = policies.at(backend_tag("other", enable_cpu_backup=True), level)
    assert other is (Policy.KEEP if selected else Policy.OFFLOAD)


# Room


def test_a_pause_without_room_for_what_it_keeps_changes_nothing(
    simulator: Simulator, make_saver: MakeSaver
) -> None:
    saver = make_saver(host_budget_bytes=GRANULE_BYTES)
    kept, dropped = filled(saver, 1, enable_cpu_backup=True), filled(saver, 2)
    with pytest.raises(HostMemoryError):
        saver.pause()
    assert holds(kept, 1)
    assert holds(dropped, 2)


def test_a_resume_without_room_can_be_made_again(
    simulator: Simulator, saver: TorchMemorySaver
) -> None:
    kept = filled(saver, 1, enable_cpu_backup=True)
    dropped = filled(saver, 2)
    saver.pause()
    simulator.set_budget_bytes(SIZE_BYTES + GRANULE_BYTES)
    with pytest.raises(DeviceMemoryError):
        saver.resume()
    assert resident(simulator) == 0
    simulator.set_budget_bytes(None)
    saver.resume()
    assert holds(kept, 1)
    assert holds(dropped, 0)


@pytest.mark.parametrize("early", [True, False])
def test_allocations_leave_a_margin(
    simulator: Simulator, make_saver: MakeSaver, early: bool
) -> None:
    saver, other = make_saver(), make_saver()
    margin = 5 * GRANULE_BYTES
    assert saver.memory_margin_bytes == 0
    if early:
        saver.memory_margin_bytes = margin
        assert saver._backend is None, "a setting is no use of the device"
    simulator.set_budget_bytes(3 * SIZE_BYTES + GRANULE_BYTES)
    memory = filled(saver, 1, enable_cpu_backup=True)
    if not early:
        saver.memory_margin_bytes = margin
    with pytest.raises(DeviceMemoryError):
        filled(saver, 2)
    theirs = filled(other, 2)
    saver.pause()
    thieves = filled(other, 3)
    saver.resume()
    assert holds(memory, 1), "waking up takes what it needs"
    for each in (theirs, thieves):
        each.free()
    saver.memory_margin_bytes = 0
    filled(saver, 2, 2 * SIZE_BYTES)
    with pytest.raises(RequestError):
        saver.memory_margin_bytes = -1
    assert saver.memory_margin_bytes == 0


@pytest.mark.parametrize("variable", [None, "1", "0"])
def test_pinned_memory_goes_after_a_resume_unless_it_is_retained(
    simulator: Simulator,
    make_saver: MakeSaver,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
) -> None:
    monkeypatch.delenv("TMS_RETAIN_CPU_BACKUP", raising=False)
    if variable is not None:
        monkeypatch.setenv("TMS_RETAIN_CPU_BACKUP", variable)
    saver = make_saver()
    assert saver.retain_cpu_backup is (variable == "1")
    memory = filled(saver, 1, enable_cpu_backup=True)
    for retain in (True, False):
        saver.retain_cpu_backup = retain
        saver.pause()
        arena = saver.backend._store
        assert arena.held_bytes >= SIZE_BYTES
        saver.resume()
        deadline = time.monotonic() + (0.2 if retain else 30)
        while arena.held_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        assert bool(arena.held_bytes) is retain
        assert holds(memory, 1)


# Making the backend


def test_the_whole_process_cannot_be_tracked(
    saver: TorchMemorySaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMS_INIT_ENABLE", "1")
    with pytest.raises(ConfigurationError, match="TMS_INIT_ENABLE") as caught:
        saver.pause()
    assert "region" in caught.value.hint
    monkeypatch.setenv("TMS_INIT_ENABLE", "0")
    saver.pause()


def test_the_first_uses_share_one_backend(saver: TorchMemorySaver) -> None:
    together = threading.Barrier(4, timeout=30)

    def use(_: int) -> object:
        together.wait()
        return saver.backend

    with ThreadPoolExecutor(4) as pool:
        assert len(set(map(id, pool.map(use, range(4))))) == 1
