"""Copies between devices and saved bytes: queued without waiting, waited for once.

Each device copies on a lane of its own, so that the links of several devices are busy at
once. What is not in pinned memory goes through a ring of buffers, and what is packed through the
slots of a bench. Work is handed back in the order in which it was queued, as its copies land.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Generic, TypeVar

from sleepbackends.errors import MechanismError, SleepBackendsError, add_note
from sleepbackends.vmm.driver import Direction, Driver, Event, Lane, LaneUse
from sleepbackends.vmm.packing.bench import Bench
from sleepbackends.vmm.packing.transfer import Transfer
from sleepbackends.vmm.places import Place
from sleepbackends.vmm.ring import Ring

GROUP_BYTES: dict[Direction, int] = {"down": 1 << 30, "up": 4 << 30}
"""How much is copied between two points that are waited for. On an H200 each such point
costs the link half a millisecond, 10 % with one for every 256 MiB; on the way down a group
that has landed can be unmapped while the next is being copied."""

SubjectT = TypeVar("SubjectT")

AnyTransfer = tuple[int, Place] | Transfer
"""A copy to be made: device address, and where its bytes are saved; or one of packed bytes."""

Benches = Mapping[int, Bench | None]
"""The slots for packed bytes of each device that has any."""

_NO_BENCHES: Benches = MappingProxyType({})


@dataclass(slots=True)
class Work(Generic[SubjectT]):
    """Some copies of one device, and whatever they are about.

    Parameters
    ----------
    device : int
        Ordinal of the device.
    transfers : iterable of (address, place) or Transfer
        The copies; there may be none. Those of packed bytes are of a device that has a bench.
    size_bytes : int
        How many bytes are done with when they have landed, copied or not.
    subject : object
        For whoever made it.
    damaged : list of int
        Once its copies have landed: the device addresses of those transfers whose saved bytes
        turned out to be others than had been saved. They did not reach the device.
    """

    device: int
    transfers: Iterable[AnyTransfer]
    size_bytes: int
    subject: SubjectT
    damaged: list[int] = field(default_factory=list)


def move(
    driver: Driver,
    ring: Ring,
    works: Iterable[Work[SubjectT]],
    direction: Direction,
    on_queued: Callable[[], None] = lambda: None,
    on_unsettled: Callable[[int], None] = lambda device: None,
    use: LaneUse = "copy",
    benches: Benches = _NO_BENCHES,
) -> Generator[Work[SubjectT], None, None]:
    """Copy, queued as work comes, and yield each work when its copies have landed.

    However this ends, no copy is under way afterwards, except on devices for which
    ``on_unsettled`` was called: waiting for those failed too. ``on_queued`` is called once
    nothing but the loss of a device can keep the copies from being made.

    Raises
    ------
    MechanismError
        If the driver refuses a copy, or one failed.
    HostMemoryError
        If there is no memory where a copy should go.
    StorageFullError, StorageError
        If bytes cannot be written where a copy should go, or be read from there.
    """
    lanes: dict[int, Lane] = {}
    try:
        get_lane = partial(driver.lane, use=use)
        yield from _move(get_lane, ring, lanes, works, direction, on_queued, benches)
    except BaseException as error:
        ring.settle()
        for device, lane in lanes.items():
            bench = benches.get(device)
            try:
                _settle(lane, bench)
            except SleepBackendsError as second:
                on_unsettled(device)
                add_note(error, f"waiting for the copies under way failed too: {second!r}")
        raise


def _settle(lane: Lane, bench: Bench | None) -> None:
    if bench is not None:
        bench.forget()
        bench.lane.wait()
    lane.wait()


def _move(
    lane: Callable[[int], Lane],
    ring: Ring,
    lanes: dict[int, Lane],
    works: Iterable[Work[SubjectT]],
    direction: Direction,
    on_queued: Callable[[], None],
    benches: Benches,
) -> Generator[Work[SubjectT], None, None]:
    queued = deque[_Group[SubjectT]]()
    open_groups: dict[int, _Group[SubjectT]] = {}
    for work in works:
        device = work.device
        group = open_groups.get(device)
        if group is None:
            if device not in lanes:
                lanes[device] = lane(device)
            group = open_groups[device] = _Group(lanes[device], device, benches)
        group.add(work, ring, direction)
        if group.size_bytes < GROUP_BYTES[direction]:
            continue
        queued.append(open_groups.pop(device).closed())
        while queued and queued[0].has_landed():
            ring.check()
            yield from queued.popleft().works
    queued.extend(group.closed() for group in open_groups.values())
    ring.finish()
    on_queued()
    for group in queued:
        group.wait()
        yield from group.works


class _Group(Generic[SubjectT]):
    """Work whose copies are waited for together."""

    def __init__(self, lane: Lane, device: int, benches: Benches) -> None:
        self._lane = lane
        self._device = device
        self._benches = benches
        self.works: list[Work[SubjectT]] = []
        self.size_bytes = 0
        self._copies = 0
        self._unpacking: Bench | None = None
        self._through_ring: list[tuple[Work[SubjectT], int, Future[bool]]] = []
        self._events: list[Event] = []

    def add(self, work: Work[SubjectT], ring: Ring, direction: Direction) -> None:
        self.works.append(work)
        self.size_bytes += work.size_bytes
        if work.transfers:
            self._lane.copy_all(direction, self._direct(work, ring, direction))

    def _direct(
        self, work: Work[SubjectT], ring: Ring, direction: Direction
    ) -> Iterator[tuple[int, int, int]]:
        """Choose the copies that the device makes itself; the ring makes the others."""
        for transfer in work.transfers:
            if isinstance(transfer, Transfer):
                yield from self._packed(work, ring, direction, transfer)
                continue
            address, place = transfer
            host = place.host
            # Through memory that is not pinned either, a copy would only be made twice.
            if host is None or (not place.pinned and ring.is_pinned):
                copy = ring.copy(self._lane, direction, address, place)
                self._through_ring.append((work, address, copy))
            else:
                self._copies += 1
                yield address, host, place.size_bytes

    def _packed(
        self, work: Work[SubjectT], ring: Ring, direction: Direction, transfer: Transfer
    ) -> Iterator[tuple[int, int, int]]:
        """As ``_direct``, for the places of packed bytes, to and from a slot."""
        bench = self._benches[self._device]
        if bench is None:
            raise MechanismError("there are no slots for packed bytes")
        slot = bench.begin(self._lane, transfer)
        address = slot.address
        for place in transfer.places():
            host = place.host
            if host is None or (not place.pinned and ring.is_pinned):
                copy = ring.copy(self._lane, direction, address, place)
                self._through_ring.append((work, transfer.span.address, copy))
                slot.copies.append(copy)
            else:
                yield address, host, place.size_bytes
            address += place.size_bytes
        self._copies += 1
        bench.end(self._lane, transfer, slot)
        if direction == "up":
            self._unpacking = bench

    def closed(self) -> _Group[SubjectT]:
        if self._copies:
            self._events.append(self._lane.event())
        if self._unpacking is not None:
            self._unpacking.finish()
            self._events.append(self._unpacking.lane.event())
        return self

    def has_landed(self) -> bool:
        if not all(copy.done() for _, _, copy in self._through_ring):
            return False
        if not all(event.done() for event in self._events):
            return False
        self.wait()
        return True

    def wait(self) -> None:
        for event in self._events:
            event.wait()
        for work, address, copy in self._through_ring:
            if not copy.result():
                work.damaged.append(address)
        self._through_ring.clear()
