"""What is copied where, in which groups, and how a failure ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sleepbackends.control import Control
from sleepbackends.errors import MechanismError
from sleepbackends.ledger import Block
from sleepbackends.vmm import mover
from sleepbackends.vmm.mover import Saved, move


class FakeSlot:
    """Pieces of host memory at made-up addresses."""

    def __init__(self, pieces: list[tuple[int, int]]) -> None:
        self._pieces = pieces

    def pieces(self) -> Iterator[tuple[int, int]]:
        return iter(self._pieces)


class FakeLane:
    """Writes down what is queued; a copy lands when somebody waits for a later event."""

    def __init__(self, device: int, log: list[Any]) -> None:
        self.device = device
        self.log = log
        self.refuse_at: int | None = None
        self.wait_fails = False

    def to_host(self, host: int, address: int, size_bytes: int) -> None:
        if self.refuse_at == address:
            raise MechanismError("refused")
        self.log.append(("down", self.device, address, host, size_bytes))

    def to_device(self, address: int, host: int, size_bytes: int) -> None:
        self.log.append(("up", self.device, address, host, size_bytes))

    def event(self) -> FakeEvent:
        self.log.append(("event", self.device))
        return FakeEvent(self)

    def wait(self) -> None:
        self.log.append(("wait", self.device))
        if self.wait_fails:
            raise MechanismError("cannot wait")


class FakeEvent:
    def __init__(self, lane: FakeLane) -> None:
        self._lane = lane

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._lane.log.append(("landed", self._lane.device))


class FakeDriver:
    def __init__(self) -> None:
        self.log: list[Any] = []
        self.lanes = {device: FakeLane(device, self.log) for device in (0, 1)}

    def lane(self, device: int, use: str) -> FakeLane:
        assert use == "copy"
        return self.lanes[device]


def block(address: int, device: int, size_bytes: int = 100) -> tuple[Block, Saved]:
    slot: Any = FakeSlot([(address + 10**6, size_bytes)])
    return Block(address, size_bytes, "weights"), Saved(device, [(0, size_bytes)], slot)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 300)), min_size=1, max_size=8),
    st.data(),
)
def test_copies_cover_every_byte_once_in_order(
    gaps_and_sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    ranges, offset = [], 0
    for gap, size in gaps_and_sizes:
        ranges.append((offset + gap, size))
        offset += gap + size
    left = sum(size for _, size in ranges)
    pieces, host_at = [], 10**6
    while left:
        size = data.draw(st.integers(1, left))
        pieces.append((host_at, size))
        host_at += size + data.draw(st.integers(0, 5))
        left -= size
    slot: Any = FakeSlot(pieces)
    copies = list(Saved(0, ranges, slot).copies(7000))
    device = [7000 + at + i for at, size in ranges for i in range(size)]
    host = [at + i for at, size in pieces for i in range(size)]
    assert [a + i for a, _, size in copies for i in range(size)] == device
    assert [h + i for _, h, size in copies for i in range(size)] == host
    assert len(copies) < len(ranges) + len(pieces), "no more cuts than the two lists have"


def test_copies_are_queued_as_blocks_come_and_groups_closed_by_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mover, "GROUP_BYTES", {"down": 200, "up": 200})
    fake: Any = FakeDriver()
    blocks = [block(address, device=address >= 5000) for address in (1000, 5000, 2000, 3000)]
    queued = []
    control = Control()
    control.start("suspend", 400)
    moved = move(fake, blocks, "down", control, lambda: queued.append(len(fake.log)))
    assert [each.address for each in moved] == [1000, 2000, 5000, 3000]
    copies = [entry[1:3] for entry in fake.log if entry[0] == "down"]
    assert copies == [(0, 1000), (1, 5000), (0, 2000), (0, 3000)]
    assert [entry for entry in fake.log if entry[0] == "event"] == [
        *(("event", 0), ("event", 1), ("event", 0))
    ]
    assert queued == [7], "everything was queued before anything was waited for"
    assert control.progress.done_bytes == 400


def test_the_first_error_is_raised_and_every_lane_waited_for() -> None:
    fake: Any = FakeDriver()
    fake.lanes[0].refuse_at = 2000
    fake.lanes[0].wait_fails = True
    unsettled: list[int] = []
    blocks = [block(1000, 0), block(5000, 1), block(2000, 0)]
    with pytest.raises(MechanismError, match="refused") as caught:
        list(move(fake, blocks, "down", Control(), on_unsettled=unsettled.append))
    assert fake.log[-2:] == [("wait", 0), ("wait", 1)]
    assert unsettled == [0]
    assert any("cannot wait" in note for note in caught.value.__notes__)


def test_giving_up_half_way_waits() -> None:
    fake: Any = FakeDriver()
    moved: Any = move(fake, [block(1000, 0), block(5000, 1)], "up", Control())
    next(moved)
    moved.close()
    assert fake.log[-2:] == [("wait", 0), ("wait", 1)]
