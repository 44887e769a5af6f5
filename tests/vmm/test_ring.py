"""Copies through the ring: contents, order, bounds, and every way in which a step can fail."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sleepbackends.errors import HostMemoryError, MechanismError, StorageError
from sleepbackends.vmm import places, ring
from sleepbackends.vmm.mover import Work, move
from sleepbackends.vmm.ring import Ring

BUFFER = 4096
STEPS = ("copy", "event", "wait", "write", "read")


class Device:
    """A driver of one device, whose copies are made when somebody waits for them."""

    def __init__(self, *, pins: int = 99, fault: tuple[str, int] = ("", 0)) -> None:
        self.pinned: set[int] = set()
        self.pins = pins
        self.fault = fault
        self.count = 0
        self.queued: list[tuple[int, int, int]] = []
        self.broken = False
        self._lock = threading.RLock()

    def step(self, kind: str) -> None:
        with self._lock:
            self.count += kind == self.fault[0]
            if kind == self.fault[0] and self.count == self.fault[1]:
                raise MechanismError(f"{kind} failed")

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pin(self, address: int, size_bytes: int) -> None:
        with self._lock:
            if len(self.pinned) >= self.pins:
                raise HostMemoryError("no pinning here")
            self.pinned.add(address)

    def unpin(self, address: int) -> None:
        if self.broken:
            raise MechanismError("it stays pinned")
        self.pinned.remove(address)

    def lane(self, device: int, use: str) -> Device:
        return self

    def to_host(self, host: int, address: int, size_bytes: int) -> None:
        self.queue(host, address, size_bytes)

    def to_device(self, address: int, host: int, size_bytes: int) -> None:
        self.queue(address, host, size_bytes)

    def copy_all(self, direction: str, copies: Iterable[tuple[int, int, int]]) -> None:
        for address, host, size_bytes in copies:
            if direction == "down":
                self.to_host(host, address, size_bytes)
            else:
                self.to_device(address, host, size_bytes)

    def queue(self, *copy: int) -> None:
        self.step("copy")
        with self._lock:
            self.queued.append(copy)  # type: ignore[arg-type]

    def event(self) -> Device:
        self.step("event")
        return self

    def wait_for(self, event: Device) -> None:
        event.wait()

    def done(self) -> bool:
        return not self.queued

    def wait(self) -> None:
        self.step("wait")
        if self.broken:
            raise MechanismError("the device is lost")
        with self._lock:
            for target, source, size_bytes in self.queued:
                ctypes.memmove(target, source, size_bytes)
            self.queued.clear()


@dataclass
class Shelf:
    """A place that is not in memory, as far as anybody can tell."""

    device: Device
    data: bytearray
    sound: bool = True
    busy: list[int] = field(default_factory=list)
    host: None = None
    pinned: bool = False

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def write(self, source: int) -> None:
        with self.working("write"):
            self.data[:] = ctypes.string_at(source, len(self.data))

    def read(self, target: int) -> bool:
        with self.working("read"):
            ctypes.memmove(target, bytes(self.data), len(self.data))
            return self.sound

    @contextmanager
    def working(self, kind: str) -> Iterator[None]:
        self.busy.append(1)
        try:
            time.sleep(0.0002)
            self.device.step(kind)
            yield
        finally:
            self.busy.pop()


class Bench:
    """Device memory and shelves, cut in the same way."""

    def __init__(self, device: Device, sizes: list[int]) -> None:
        self.device = device
        self.memory = ctypes.create_string_buffer(bytes(i % 251 for i in range(sum(sizes) + 1)))
        self.busy: list[int] = []
        self.shelves = [Shelf(device, bytearray(size), busy=self.busy) for size in sizes]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def works(self) -> Iterator[Work[int]]:
        base = ctypes.addressof(self.memory)
        for number, (start, shelf) in enumerate(zip(self.starts, self.shelves, strict=True)):
            yield Work(0, iter([(base + start, shelf)]), shelf.size_bytes, number)

    def on_device(self, number: int) -> bytes:
        return self.memory.raw[self.starts[number] :][: self.shelves[number].size_bytes]

    def holds(self, number: int) -> bool:
        return self.on_device(number) == self.shelves[number].data


@pytest.fixture(autouse=True, scope="module")
def small_buffers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "BUFFER_BYTES", BUFFER)
        yield


@contextmanager
def opened(device: Any, buffers: int = 3) -> Iterator[Ring]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "BUFFERS", buffers)
        opened = Ring(device)
        try:
            yield opened
        finally:
            device.fault, device.broken = ("", 0), False
            opened.trim()
            assert not device.pinned
            assert not opened.held_bytes


SIZES = st.lists(st.integers(1, BUFFER), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 4), st.integers(0, 4))
def test_everything_arrives_in_order(sizes: list[int], buffers: int, pins: int) -> None:
    device: Any = Device(pins=pins)
    bench = Bench(device, sizes)
    with opened(device, buffers) as through:
        for number, work in enumerate(move(device, through, bench.works(), "down")):
            assert work.subject == number
            assert bench.holds(number), "not before it has landed"
        before = bench.memory.raw
        ctypes.memset(bench.memory, 0xEE, sum(sizes))
        for number, work in enumerate(move(device, through, bench.works(), "up")):
            assert (work.subject, work.damaged) == (number, [])
            assert bench.holds(number)
        assert bench.memory.raw == before
        assert through.held_bytes <= BUFFER * buffers
        assert len(device.pinned) <= min(pins, buffers)


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(1, 4), st.sampled_from(STEPS), st.integers(1, 30), st.booleans())
def test_a_failure_anywhere(
    sizes: list[int], buffers: int, kind: str, nth: int, down: bool
) -> None:
    device: Any = Device(fault=(kind, nth))
    bench = Bench(device, sizes)
    with opened(device, buffers) as through:
        landed = []
        try:
            for work in move(device, through, bench.works(), "down" if down else "up"):
                assert bench.holds(work.subject)
                landed.append(work.subject)
        except MechanismError as error:
            assert f"{kind} failed" in str(error)
        else:
            assert device.count < nth
            assert len(landed) == len(sizes)
        assert landed == list(range(len(landed)))
        assert not bench.busy, "no thread is at work"
        assert not device.queued, "no copy is under way"
        device.fault = ("", 0)
        moved = list(move(device, through, bench.works(), "down"))
        assert len(moved) == len(sizes), "no buffer was lost"
        assert all(bench.holds(number) for number in range(len(sizes)))


def test_giving_up_half_way_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sleepbackends.vmm.mover.GROUP_BYTES", {"down": BUFFER, "up": BUFFER})
    device: Any = Device()
    bench = Bench(device, [BUFFER] * 40)
    with opened(device) as through:
        moved = move(device, through, bench.works(), "down")
        next(moved)
        moved.close()
        assert not bench.busy
        assert not device.queued


def test_a_lost_device_is_told_and_its_buffers_are_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device: Any = Device()
    bench = Bench(device, [BUFFER])
    unsettled: list[int] = []
    with opened(device, 1) as through:
        device.broken = True
        with pytest.raises(MechanismError, match="lost"):
            list(move(device, through, bench.works(), "down", on_unsettled=unsettled.append))
        assert unsettled == [0]
        assert through.trim() == 0, "the device may still write to it"
        assert "stay pinned" in caplog.text
        with pytest.raises(MechanismError, match="lost"):
            list(move(device, through, bench.works(), "down"))
        device.broken = False
        assert len(list(move(device, through, bench.works(), "down"))) == 1
        assert bench.holds(0)


def test_a_copy_without_an_event_is_waited_for_too() -> None:
    device: Any = Device(fault=("event", 1))
    bench = Bench(device, [BUFFER])
    with opened(device, 1) as through:
        device.broken = True
        with pytest.raises(MechanismError, match="event failed"):
            list(move(device, through, bench.works(), "down"))
        device.unpin = device.pinned.remove
        assert through.trim() == 0, "the device may still write to it"
        device.broken = False
        assert through.trim() == BUFFER


def test_what_is_damaged_does_not_reach_the_device() -> None:
    device: Any = Device()
    bench = Bench(device, [100, 200, 300])
    bench.shelves[1].sound = False
    before = bench.on_device(1)
    with opened(device) as through:
        works = list(move(device, through, bench.works(), "up"))
    assert [bool(work.damaged) for work in works] == [False, True, False]
    assert bench.on_device(1) == before
    assert bench.holds(0)
    assert bench.holds(2)


def test_saving_is_certain_only_once_it_is_written() -> None:
    device: Any = Device(fault=("write", 5))
    bench = Bench(device, [BUFFER] * 5)
    certain: list[bool] = []
    with opened(device) as through, pytest.raises(MechanismError, match="write failed"):
        list(move(device, through, bench.works(), "down", lambda: certain.append(True)))
    assert not certain


def test_no_more_than_a_few_copies_are_begun_ahead() -> None:
    device: Any = Device()
    bench = Bench(device, [BUFFER] * 100)
    go_on = threading.Event()
    begun: list[int] = []

    def stuck(source: int) -> None:
        assert go_on.wait(60)

    bench.shelves[0].write = stuck  # type: ignore[method-assign]

    def counted() -> Iterator[Work[int]]:
        for work in bench.works():
            begun.append(work.subject)
            yield work

    with opened(device, 2) as through:
        moving = threading.Thread(
            target=lambda: list(move(device, through, counted(), "down")), daemon=True
        )
        moving.start()
        time.sleep(0.1)
        assert len(begun) == 2 * ring.AHEAD + 1
        go_on.set()
        moving.join(60)
        assert len(begun) == 100


def test_no_memory_for_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, size_bytes: int) -> None:
        raise HostMemoryError("no memory")

    device: Any = Device()
    bench = Bench(device, [BUFFER] * 3)
    with opened(device) as through:
        with monkeypatch.context() as patch:
            patch.setattr("sleepbackends.hostmemory.driver.populate", refuse)
            with pytest.raises(HostMemoryError, match="no memory"):
                list(move(device, through, bench.works(), "down"))
            assert not through.is_pinned, "memory is copied without it"
        assert len(list(move(device, through, bench.works(), "down"))) == 3


def test_an_error_of_a_place_is_raised_as_it_is() -> None:
    device: Any = Device()
    bench = Bench(device, [BUFFER])

    def broken(target: int) -> bool:
        raise StorageError("cannot be read")

    bench.shelves[0].read = broken  # type: ignore[method-assign]
    with opened(device) as through, pytest.raises(StorageError, match="cannot be read"):
        list(move(device, through, bench.works(), "up"))
