"""Memory for a device's bytes is touched on the node of the device, where there are several."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sleepbackends.errors import HostMemoryError, MechanismError
from sleepbackends.hostmemory import numa
from sleepbackends.vmm import arena as module
from sleepbackends.vmm.arena import Arena
from sleepbackends.vmm.near import Near
from sleepbackends.vmm.places import Slot
from sleepbackends.vmm.touch import touch
from tests.hostmemory.sysfs import sysfs

PAGE = 4096
CHUNK = 4 * PAGE
NODES = {0: "0-1", 1: "2-3"}
CPUS = [frozenset({0, 1}), frozenset({2, 3})]
DEVICES = {"0000:10:00.0": "0", "0000:11:00.0": "1", "0000:12:00.0": "-1"}


class Devices:
    """A driver that pins nothing and says where its devices are."""

    def __init__(self) -> None:
        self.asked = Counter[int]()
        self.fails = False

    def pci_address(self, device: int) -> str | None:
        self.asked[device] += 1
        if self.fails:
            raise MechanismError("it does not say")
        return None if device == 3 else f"0000:{0x10 + device:02X}:00.0"

    def pin(self, address: int, size_bytes: int) -> None:
        pass

    def unpin(self, address: int) -> None:
        pass


class Threads:
    """Where threads were told to run, and where they did when they touched memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.where: dict[int, frozenset[int]] = {}
        self.touched: dict[int, frozenset[int] | None] = {}
        self.refuses = False

        def note(address: int, size_bytes: int) -> None:
            self.touched[address] = self.where.get(threading.get_ident())
            touch(address, size_bytes)

        patch.setattr(module, "touch", note)
        patch.setattr(module, "CHUNK_BYTES", CHUNK)
        patch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
        patch.setattr(os, "sched_setaffinity", self.run_on)

    def run_on(self, thread: int, cpus: frozenset[int]) -> None:
        assert thread == 0, "no other thread than the caller's"
        if self.refuses:
            raise PermissionError(1, "not permitted")
        self.where[threading.get_ident()] = cpus

    def of(self, slot: Slot) -> set[frozenset[int] | None]:
        """Where threads ran that touched a slot."""
        found = set()
        for part in slot.ranges:
            part.wait()
            segment = part.segment
            for at in range(part.offset, part.offset + part.size_bytes):
                if at == part.offset or not at % segment.chunk_bytes:
                    start = at // segment.chunk_bytes * segment.chunk_bytes
                    found.add(self.touched[segment.address + start])
        return found


@pytest.fixture
def threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Threads:
    monkeypatch.setattr(numa, "SYSFS", sysfs(tmp_path, NODES, DEVICES))
    return Threads(monkeypatch)


@contextmanager
def opened(budget_bytes: int | None = None, *, fails: bool = False) -> Iterator[tuple[Arena, Any]]:
    driver: Any = Devices()
    driver.fails = fails
    arena = Arena(driver, budget_bytes, "retain")
    try:
        yield arena, driver
    finally:
        arena.close()
        assert not arena.held_bytes


def test_what_two_devices_save_is_touched_on_their_nodes(threads: Threads) -> None:
    with opened() as (arena, driver):
        sizes, devices = [3 * CHUNK, CHUNK, 100, 2 * CHUNK, 200], [0, 1, 1, 0, 1]
        slots = arena.take(sizes, devices=devices)
        assert [slot.size_bytes for slot in slots] == sizes
        assert [threads.of(slot) for slot in slots] == [{CPUS[device]} for device in devices]
        for slot in slots:
            arena.give_back(slot)
        held = arena.held_bytes
        again = arena.take(sizes[:3], devices=devices[:3])
        assert arena.held_bytes == held, "what is there on the node is used again"
        assert [threads.of(slot) for slot in again] == [{CPUS[device]} for device in devices[:3]]
        assert driver.asked == {0: 1, 1: 1}


@pytest.mark.parametrize("device", [2, 3], ids=["of no node", "of no address"])
def test_a_thread_that_was_on_a_node_is_anywhere_again(device: int, threads: Threads) -> None:
    with opened() as (arena, _):
        near, other = arena.take([20 * CHUNK, 20 * CHUNK], devices=[0, device])
        assert threads.of(near) == {CPUS[0]}
        assert threads.of(other) == {CPUS[0] | CPUS[1]}


def test_memory_that_is_made_ready_at_ease_is_near_too(threads: Threads) -> None:
    with opened() as (arena, _):
        (slot,) = arena.take([CHUNK], devices=[1], at_ease=True)
        assert not threads.touched
        assert threads.of(slot) == {CPUS[1]}


@pytest.mark.parametrize("refuses", [True, False])
def test_a_refusal_fails_nothing(refuses: bool, threads: Threads) -> None:
    threads.refuses = refuses
    with opened(fails=not refuses) as (arena, _):
        (slot,) = arena.take([2 * CHUNK], devices=[0])
        assert threads.of(slot) == ({None} if refuses else {CPUS[0] | CPUS[1]})


def test_where_a_node_may_hold_no_more_what_is_free_on_others_serves(threads: Threads) -> None:
    with opened(budget_bytes=4 * CHUNK) as (arena, _):
        (first,) = arena.take([3 * CHUNK], devices=[0])
        arena.give_back(first)
        arena.check_room(4 * CHUNK)
        (other,) = arena.take([4 * CHUNK], devices=[1])
        assert threads.of(other) == {CPUS[0], CPUS[1]}
        assert arena.held_bytes == 4 * CHUNK


def test_if_one_device_gets_nothing_the_other_gets_nothing(threads: Threads) -> None:
    with opened(budget_bytes=4 * CHUNK) as (arena, _):
        (kept,) = arena.take([CHUNK], devices=[0])
        with pytest.raises(HostMemoryError):
            arena.take([2 * CHUNK, 2 * CHUNK], devices=[0, 1])
        assert arena.held_bytes == arena.used_bytes == CHUNK
        assert threads.of(kept) == {CPUS[0]}


@pytest.mark.parametrize("cpus", [{0: "0-3"}, {0: "0-3", 1: ""}, {}], ids=["one", "no CPU", "none"])
def test_with_one_node_nothing_is_asked_and_nothing_done(
    cpus: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "SYSFS", sysfs(tmp_path, cpus, DEVICES))
    threads = Threads(monkeypatch)
    with opened() as (arena, driver):
        slots = arena.take([CHUNK, CHUNK], devices=[0, 1])
        assert [threads.of(slot) for slot in slots] == [{None}, {None}]
        assert not driver.asked
        assert not threads.where
        assert len(arena._segments) == 1


def test_a_node_that_this_process_may_not_use_is_no_aim(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = sysfs(tmp_path / "other", {**NODES, 2: "8-9"}, {"0000:10:00.0": "2"})
    monkeypatch.setattr(numa, "SYSFS", other)
    driver: Any = Devices()
    assert Near(driver).node(0) is None


TAKE = st.lists(st.tuples(st.integers(0, 3 * CHUNK), st.integers(0, 3)), max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(TAKE, st.integers(0, 20), st.just("trim")), max_size=20))
def test_accounts_are_exact_and_a_budget_is_used_up_wherever_memory_is(steps: list[Any]) -> None:
    """Whatever ``check_room`` allows is given, near or far, and no more than the budget."""
    budget = 12 * CHUNK
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Near, "node", lambda _, device: None if device == 3 else device % 2)
        patch.setattr(Near, "go", lambda *_: None)
        patch.setattr(module, "CHUNK_BYTES", CHUNK)
        with opened(budget) as (arena, _):
            taken: list[tuple[Slot, int]] = []
            for step in steps:
                if step == "trim":
                    arena.trim()
                elif isinstance(step, list):
                    _take(arena, taken, [size // PAGE * PAGE for size, _ in step], step)
                elif taken:
                    arena.give_back(taken.pop(step % len(taken))[0])
                assert arena.used_bytes == sum(size for _, size in taken)
                assert arena.used_bytes <= arena.held_bytes <= budget
                assert all(slot.size_bytes == size for slot, size in taken)


def _take(
    arena: Arena,
    taken: list[tuple[Slot, int]],
    sizes: list[int],
    step: Sequence[tuple[int, int]],
) -> None:
    before = arena.held_bytes, arena.used_bytes
    try:
        arena.check_room(sum(sizes))
    except HostMemoryError:
        with pytest.raises(HostMemoryError):
            arena.take(sizes, devices=[device for _, device in step])
        assert (arena.held_bytes, arena.used_bytes) == before
    else:
        slots = arena.take(sizes, devices=[device for _, device in step])
        taken += zip(slots, sizes, strict=True)
