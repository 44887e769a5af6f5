"""The arena: slots that never overlap, exact accounts, refusals, retention."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sleepbackends.errors import HostMemoryError, MechanismError
from sleepbackends.host_limits import HostMemory
from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm import arena as module
from sleepbackends.vmm import places
from sleepbackends.vmm.arena import Arena
from sleepbackends.vmm.places import Retention, Slot
from sleepbackends.vmm.segment import Piece
from tests.waiting import until

PAGE = 4096
CHUNK = 4 * PAGE


class Pins:
    """A driver that only pins, and can be told to refuse."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.refuses = False
        self.keeps = False
        self.lets_go = 0
        self._lock = threading.Lock()

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pin(self, address: int, size_bytes: int) -> None:
        if self.refuses:
            raise HostMemoryError("no pinning here")
        with self._lock:
            assert address not in self.pinned
            self.pinned[address] = size_bytes

    def unpin(self, address: int) -> None:
        if self.keeps and not self.lets_go:
            raise MechanismError("it stays pinned")
        with self._lock:
            self.lets_go -= 1
            del self.pinned[address]


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", CHUNK)
        yield


@contextmanager
def opened(
    budget_bytes: int | None = None, retention: Retention = "retain"
) -> Iterator[tuple[Arena, Pins]]:
    pins = Pins()
    driver: Any = pins
    arena = Arena(driver, budget_bytes, retention)
    try:
        yield arena, pins
    finally:
        pins.keeps = False
        arena.close()
        assert not pins.pinned
        assert not arena.held_bytes


def refuse(address: int, size_bytes: int) -> None:
    raise HostMemoryError("no memory")


def wait_for(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.001)


def pieces(slot: Slot) -> list[Piece]:
    return [piece for part in slot.ranges for piece in part.pieces()]


def ranges(slot: Slot) -> list[tuple[int, int]]:
    return [(piece.host, piece.host + piece.size_bytes) for piece in pieces(slot)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=4),
            st.integers(0, 20),
            st.just("trim"),
        ),
        max_size=25,
    )
)
def test_slots_never_overlap(steps: list[Any]) -> None:
    with opened() as (arena, pins):
        slots: list[tuple[Slot, int]] = []
        for step in steps:
            if step == "trim":
                arena.trim()
            elif isinstance(step, list):
                held, free = arena.held_bytes, arena.held_bytes - arena.used_bytes
                slots += zip(arena.take(step), step, strict=True)
                grown = host.round_up(max(0, sum(step) - free))
                assert arena.held_bytes == held + grown, "exactly what was missing"
            elif slots:
                arena.give_back(slots.pop(step % len(slots))[0])
            taken = sorted(each for slot, _ in slots for each in ranges(slot))
            assert all(end <= start for (_, end), (start, _) in pairwise(taken))
            assert arena.used_bytes == sum(size for _, size in slots)
            for slot, size in slots:
                assert slot.size_bytes == size == sum(end - start for start, end in ranges(slot))
        for slot, _ in slots:
            arena.give_back(slot)
        assert arena.used_bytes == 0
        # All gaps were joined: everything is one piece of free memory per segment again.
        for segment in arena._segments:
            assert segment.carve(segment.size_bytes) == (0, segment.size_bytes)
            segment.give_back(0, segment.size_bytes)
        arena.trim()
        assert arena.held_bytes == 0
        assert not pins.pinned


def test_at_ease_only_what_is_asked_for_is_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL_CHUNK_BYTES", PAGE)
    with opened() as (arena, pins):
        (first, second) = arena.take([3 * PAGE, 6 * PAGE], at_ease=True)
        assert not pins.pinned
        first.ranges[0].part(PAGE, PAGE).wait()
        assert list(pins.pinned.values()) == [PAGE]
        arena.take([], at_ease=True)
        assert len(pins.pinned) == 1
        arena.take([])
        (segment,) = arena._segments
        assert None not in segment.touched, "a hurry is for everything"
        pieces(first)
        pieces(second)
        assert len(pins.pinned) == 9
        arena.give_back(first)
        arena.give_back(second)
        assert arena.take([9 * PAGE], at_ease=True)
        assert len(pins.pinned) == 9, "it is ready already"


def test_whoever_copies_registers_once_the_memory_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of its own that registered would keep the one that queues copies waiting."""
    registering: set[int] = set()
    with opened() as (arena, pins):
        driver: Any = pins
        pin, may_go_on = pins.pin, threading.Event()
        touched: list[int] = []

        def touch(address: int, _: int) -> None:
            may_go_on.wait(20)
            touched.append(address)

        def pin_here(address: int, size_bytes: int) -> None:
            assert address in touched
            registering.add(threading.get_ident())
            pin(address, size_bytes)

        monkeypatch.setattr(module, "touch", touch)
        driver.pin = pin_here
        (slot,) = arena.take([3 * CHUNK])
        assert not pins.pinned
        may_go_on.set()
        assert len(pieces(slot)) == 3
        assert len(pins.pinned) == 3
        assert registering == {threading.get_ident()}


def test_several_that_need_a_chunk_register_it_once() -> None:
    with opened() as (arena, pins), ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            (slot,) = arena.take([2 * CHUNK])
            together = threading.Barrier(4)

            def needs(_: int, slot: Slot = slot, together: threading.Barrier = together) -> int:
                together.wait()
                return sum(piece.pinned for piece in pieces(slot))

            assert list(threads.map(needs, range(4))) == [2] * 4
            arena.give_back(slot)
            arena.trim()
        assert not pins.pinned


def test_what_was_never_asked_for_goes_again() -> None:
    with opened() as (arena, pins):
        (slot,) = arena.take([3 * CHUNK], at_ease=True)
        arena.give_back(slot)
        assert arena.trim() == 3 * CHUNK
        assert not pins.pinned


def test_a_slot_is_split_where_registrations_meet() -> None:
    with opened() as (arena, pins):
        (first, second) = arena.take([CHUNK - 100, 2 * CHUNK])
        for piece in [*pieces(first), *pieces(second)]:
            inside = [
                start
                for start, size in pins.pinned.items()
                if start <= piece.host and piece.host + piece.size_bytes <= start + size
            ]
            assert len(inside) == 1, "a copy must not cross from one registration to the next"
        assert [piece.size_bytes for piece in pieces(second)] == [100, CHUNK, CHUNK - 100]


def test_where_pinning_is_refused_memory_is_used_unpinned() -> None:
    with opened() as (arena, pins):
        pins.refuses = True
        (slot,) = arena.take([2 * CHUNK])
        for start, end in ranges(slot):
            ctypes.memset(start, 1, end - start)
        assert not pins.pinned
        arena.give_back(slot)
        pins.refuses = False
        assert arena.trim() == 2 * CHUNK


def test_what_is_not_pinned_comes_in_pieces_that_fit_a_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(places, "BUFFER_BYTES", 3 * PAGE)
    with opened() as (arena, pins):
        pins.refuses = True
        (slot,) = arena.take([CHUNK + PAGE])
        sizes = [(piece.size_bytes, piece.pinned) for piece in pieces(slot)]
        assert sizes == [(3 * PAGE, False), (PAGE, False), (PAGE, False)]
        source = ctypes.create_string_buffer(bytes(range(256)) * (3 * PAGE // 256))
        pieces(slot)[0].write(ctypes.addressof(source))
        assert slot.ranges[0].view(0, 3 * PAGE) == source.raw[:-1]
        ctypes.memset(source, 0, len(source))
        assert pieces(slot)[0].read(ctypes.addressof(source))
        assert slot.ranges[0].view(0, 3 * PAGE) == source.raw[:-1]


def test_a_chunk_without_memory_is_no_lasting_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as (arena, _):
        with monkeypatch.context() as patch:
            patch.setattr(module, "touch", refuse)
            (slot,) = arena.take([2 * CHUNK])
            with pytest.raises(HostMemoryError, match="no memory"):
                ranges(slot)
        arena.give_back(slot)
        (slot,) = arena.take([2 * CHUNK])
        assert len(ranges(slot)) == 2
        assert arena.held_bytes == 2 * CHUNK, "the segment that failed is gone"


def test_a_failed_segment_in_use_serves_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as (arena, _):
        with monkeypatch.context() as patch:
            patch.setattr(module, "touch", refuse)
            kept, given_back = arena.take([CHUNK, CHUNK])
            with pytest.raises(HostMemoryError):
                ranges(kept)
            with pytest.raises(HostMemoryError):
                ranges(given_back)
        arena.give_back(given_back)
        (slot,) = arena.take([CHUNK])
        assert len(ranges(slot)) == 1


def test_memory_stays_pinned_until_the_driver_lets_go() -> None:
    with opened() as (arena, pins):
        (slot,) = arena.take([3 * CHUNK])
        ranges(slot)
        arena.give_back(slot)
        pins.keeps, pins.lets_go = True, 1
        assert arena.trim() == 0
        assert arena.held_bytes == 3 * CHUNK, "pinned memory must not be unmapped"
        pins.keeps = False
        assert arena.trim() == 3 * CHUNK


def test_the_budget() -> None:
    with opened(budget_bytes=4 * PAGE) as (arena, _):
        arena.check_room(4 * PAGE)
        with pytest.raises(HostMemoryError, match="host_budget_bytes") as caught:
            arena.check_room(4 * PAGE + 1)
        assert caught.value.available_bytes == 4 * PAGE
        assert caught.value.needed_bytes == 5 * PAGE
        (slot,) = arena.take([3 * PAGE])
        with pytest.raises(HostMemoryError):
            arena.take([PAGE, 1])
        assert arena.held_bytes == 3 * PAGE, "nothing was taken"
        arena.give_back(slot)
        arena.check_room(4 * PAGE)


def test_the_machine_or_its_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = HostMemory(3 * PAGE, 3 * PAGE, "/sys/fs/cgroup/here")
    with opened() as (arena, _):
        (slot,) = arena.take([2 * PAGE])
        monkeypatch.setattr(module, "host_memory", lambda: limited)
        arena.give_back(slot)
        arena.check_room(5 * PAGE)  # 2 are there already
        with pytest.raises(HostMemoryError, match="/sys/fs/cgroup/here") as caught:
            arena.take([5 * PAGE + 1])
        assert caught.value.available_bytes == 3 * PAGE


@pytest.mark.parametrize("retention", ["retain", "release", "none"])
def test_retention(retention: Retention) -> None:
    with opened(retention=retention) as (arena, pins):
        (slot,) = arena.take([CHUNK])
        ranges(slot)
        arena.give_back(slot)
        arena._trimming.shutdown(wait=True)
        expected = CHUNK if retention == "retain" else 0
        assert arena.held_bytes == expected
        assert sum(pins.pinned.values()) == expected


def test_a_mapping_that_is_refused_leaves_no_range(monkeypatch: pytest.MonkeyPatch) -> None:
    released = []
    with opened() as (arena, _):
        monkeypatch.setattr(host, "map_memory", refuse)
        monkeypatch.setattr(host, "release", lambda _, size_bytes: released.append(size_bytes))
        with pytest.raises(HostMemoryError):
            arena.take([PAGE])
        assert released == [PAGE]
        assert arena.held_bytes == 0


def test_memory_that_is_looked_at_stays() -> None:
    with opened() as (arena, _):
        (slot,) = arena.take([2 * CHUNK])
        ((start, _), *_) = ranges(slot)
        ctypes.memset(start, 7, 2 * CHUNK)
        view = slot.ranges[0].view(10, CHUNK)
        assert view.readonly
        arena.give_back(slot)
        assert arena.trim() == 0
        assert bytes(view) == bytes([7]) * CHUNK
        del view
        assert arena.trim() == 2 * CHUNK


def test_memory_that_was_given_back_is_not_touched_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waits for it beside a transition is told."""
    touched: list[tuple[int, int]] = []
    monkeypatch.setattr(module, "SMALL_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(module, "touch", lambda *where: touched.append(where))
    with opened() as (arena, _):
        slot = arena.take([2 * CHUNK], at_ease=True)[0]
        (part,) = slot.ranges
        part.part(0, CHUNK).wait()
        assert len(touched) == 1
        arena.give_back(slot)
        arena.trim()
        with pytest.raises(HostMemoryError, match="given back"):
            part.wait()
    assert len(touched) == 1


def test_memory_that_cannot_be_given_back_is_used_again() -> None:
    with opened() as (arena, pins):
        (slot,) = arena.take([CHUNK])
        pieces(slot)
        arena.give_back(slot)
        pins.keeps = True
        assert arena.trim() == 0
        arena.take([CHUNK], at_ease=True)[0].ranges[0].wait()


def test_giving_back_in_the_background_does_not_keep_memory_from_being_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The threads that touch begin together, while the arena is locked."""
    running, locked = threading.Event(), threading.Event()
    trim, check_room = Arena.trim, Arena._check_room

    def trim_late(arena: Arena, *, failed_only: bool = False) -> int:
        if not failed_only:
            running.set()
            locked.wait(20)
        return trim(arena, failed_only=failed_only)

    def check(arena: Arena, more: int) -> None:
        check_room(arena, more)
        if running.is_set():
            locked.set()

    monkeypatch.setattr(Arena, "trim", trim_late)
    monkeypatch.setattr(Arena, "_check_room", check)
    with opened(retention="release") as (arena, _):
        arena.give_back(arena.take([PAGE], at_ease=True)[0])
        assert running.wait(20)
        taken: list[Slot] = []
        taker = threading.Thread(target=lambda: taken.extend(arena.take([9 * PAGE])), daemon=True)
        taker.start()
        taker.join(10)
        assert taken, "whoever takes waits for a thread that waits for the lock"
        pieces(taken[0])
        arena.give_back(taken[0])


def test_what_the_driver_refuses_in_the_background_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(retention="release") as (arena, pins):
        (slot,) = arena.take([1000])
        slot.ranges[0].wait()

        def refused() -> AbstractContextManager[None]:
            raise MechanismError("the driver is gone")

        monkeypatch.setattr(pins, "aside", refused)
        arena.give_back(slot)
        until(lambda: "stays until the next time" in caplog.text)
        assert arena.held_bytes
        assert arena.trim()
        assert not arena.held_bytes
