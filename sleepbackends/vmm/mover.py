"""Copies between device and pinned memory: queued without waiting, waited for once.

Each device copies on a lane of its own, so that the links of several devices are busy at
once. Blocks are handed back in the order in which they were queued, as their copies land.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sleepbackends.control import Control
from sleepbackends.errors import SleepBackendsError, add_note
from sleepbackends.ledger import Block
from sleepbackends.vmm.arena import Slot
from sleepbackends.vmm.driver import Driver, Event, Lane

Direction = Literal["down", "up"]
"""From the device to the host, or back."""

GROUP_BYTES: dict[Direction, int] = {"down": 1 << 30, "up": 4 << 30}
"""How much is copied between two points that are waited for. On an H200 each such point
costs the link half a millisecond, 10 % with one for every 256 MiB; on the way down a group
that has landed can be unmapped while the next is being copied."""


@dataclass
class Saved:
    """Where the bytes of a block are saved.

    Parameters
    ----------
    device : int
        Ordinal of the device.
    ranges : sequence of (offset, size_bytes)
        What of the block was saved: the bytes that were allocated then. In the slot they
        lie one after another.
    slot : Slot
        Room for exactly those bytes.
    checksum : int, optional
        Of the bytes in the slot, where checks were asked for.
    """

    device: int
    ranges: Sequence[tuple[int, int]]
    slot: Slot
    checksum: int | None = None

    def copies(self, address: int) -> Iterator[tuple[int, int, int]]:
        """List the copies: device address, host address, bytes; in the order of both."""
        ranges = iter(self.ranges)
        offset, left = 0, 0
        for host, size_bytes in self.slot.pieces():
            done = 0
            while done < size_bytes:
                if not left:
                    offset, left = next(ranges)
                step = min(left, size_bytes - done)
                yield address + offset, host + done, step
                offset, left, done = offset + step, left - step, done + step


def move(
    driver: Driver,
    blocks: Iterable[tuple[Block, Saved]],
    direction: Direction,
    control: Control,
    on_queued: Callable[[], None] = lambda: None,
    on_unsettled: Callable[[int], None] = lambda device: None,
) -> Iterator[Block]:
    """Copy blocks, queued as they come, and yield each when its copy has landed.

    However this ends, no copy is under way afterwards, except on devices for which
    ``on_unsettled`` was called: waiting for those failed too. ``on_queued`` is called once
    every copy has been queued.

    Raises
    ------
    MechanismError
        If the driver refuses a copy, or one failed.
    HostMemoryError
        If there is no memory where a copy should go.
    TransitionTimeoutError
        If the deadline has passed.
    """
    lanes: dict[int, Lane] = {}
    try:
        yield from _move(driver, lanes, blocks, direction, control, on_queued)
    except BaseException as error:
        for device, lane in lanes.items():
            try:
                lane.wait()
            except SleepBackendsError as second:
                on_unsettled(device)
                add_note(error, f"waiting for the copies under way failed too: {second!r}")
        raise


def _move(
    driver: Driver,
    lanes: dict[int, Lane],
    blocks: Iterable[tuple[Block, Saved]],
    direction: Direction,
    control: Control,
    on_queued: Callable[[], None],
) -> Iterator[Block]:
    queued = deque[_Group]()
    open_groups: dict[int, _Group] = {}
    for block, saved in blocks:
        device = saved.device
        if device not in lanes:
            lanes[device] = driver.lane(device, "copy")
        _queue(lanes[device], block, saved, direction)
        group = open_groups.setdefault(device, _Group())
        group.add(block)
        if group.size_bytes >= GROUP_BYTES[direction]:
            queued.append(open_groups.pop(device).closed(lanes[device]))
        while queued and queued[0].has_landed():
            yield from queued.popleft().count(control)
    queued.extend(group.closed(lanes[device]) for device, group in open_groups.items())
    on_queued()
    for group in queued:
        group.wait()
        yield from group.count(control)


def _queue(lane: Lane, block: Block, saved: Saved, direction: Direction) -> None:
    for address, host, size_bytes in saved.copies(block.address):
        if direction == "down":
            lane.to_host(host, address, size_bytes)
        else:
            lane.to_device(address, host, size_bytes)


class _Group:
    """Blocks whose copies are waited for together."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.size_bytes = 0
        self._event: Event | None = None

    def add(self, block: Block) -> None:
        self.blocks.append(block)
        self.size_bytes += block.size_bytes

    def closed(self, lane: Lane) -> _Group:
        self._event = lane.event()
        return self

    def has_landed(self) -> bool:
        return self._event is not None and self._event.done()

    def wait(self) -> None:
        if self._event is not None:
            self._event.wait()

    def count(self, control: Control) -> Iterator[Block]:
        for block in self.blocks:
            control.advance(block.size_bytes)
            yield block
