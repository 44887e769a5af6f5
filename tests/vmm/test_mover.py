"""What is copied where, in which groups, and how a failure ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from sleepbackends.errors import MechanismError
from sleepbackends.vmm import mover
from sleepbackends.vmm.mover import Work, move
from sleepbackends.vmm.ring import Ring
from sleepbackends.vmm.segment import Piece


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

    def copy_all(self, direction: str, copies: Iterable[tuple[int, int, int]]) -> None:
        for address, host, size_bytes in copies:
            if direction == "down":
                self.to_host(host, address, size_bytes)
            else:
                self.to_device(address, host, size_bytes)

    def event(self) -> FakeEvent:
        self.log.append(("event", self.device))
        return FakeEvent(self)

    def wait_for(self, event: FakeEvent) -> None:
        self.log.append(("after", self.device, event.lane.device))

    def wait(self) -> None:
        self.log.append(("wait", self.device))
        if self.wait_fails:
            raise MechanismError("cannot wait")


class FakeEvent:
    def __init__(self, lane: FakeLane) -> None:
        self.lane = lane

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self.lane.log.append(("landed", self.lane.device))


class FakeDriver:
    def __init__(self) -> None:
        self.log: list[Any] = []
        self.lanes = {device: FakeLane(device, self.log) for device in (0, 1)}

    def lane(self, device: int, use: str) -> FakeLane:
        assert use == "copy"
        return self.lanes[device]


def work(address: int, device: int, size_bytes: int = 100) -> Work[int]:
    return Work(device, [(address, Piece(address + 10**6, size_bytes, True))], size_bytes, address)


def test_copies_are_queued_as_blocks_come_and_groups_closed_by_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mover, "GROUP_BYTES", {"down": 200, "up": 200})
    fake: Any = FakeDriver()
    works = [work(address, device=address >= 5000) for address in (1000, 5000, 2000, 3000)]
    queued: list[int] = []
    moved = move(fake, Ring(fake), works, "down", lambda: queued.append(len(fake.log)))
    assert [each.subject for each in moved] == [1000, 2000, 5000, 3000]
    copies = [entry[1:3] for entry in fake.log if entry[0] == "down"]
    assert copies == [(0, 1000), (1, 5000), (0, 2000), (0, 3000)]
    assert [entry for entry in fake.log if entry[0] == "event"] == [
        *(("event", 0), ("event", 1), ("event", 0))
    ]
    assert queued == [7], "everything was queued before anything was waited for"


def test_the_first_error_is_raised_and_every_lane_waited_for() -> None:
    fake: Any = FakeDriver()
    fake.lanes[0].refuse_at = 2000
    fake.lanes[0].wait_fails = True
    unsettled: list[int] = []
    works = [work(1000, 0), work(5000, 1), work(2000, 0)]
    with pytest.raises(MechanismError, match="refused") as caught:
        list(move(fake, Ring(fake), works, "down", on_unsettled=unsettled.append))
    assert fake.log[-2:] == [("wait", 0), ("wait", 1)]
    assert unsettled == [0]
    assert any("cannot wait" in note for note in caught.value.__notes__)


def test_giving_up_half_way_waits() -> None:
    fake: Any = FakeDriver()
    moved = move(fake, Ring(fake), [work(1000, 0), work(5000, 1)], "up")
    next(moved)
    moved.close()
    assert fake.log[-2:] == [("wait", 0), ("wait", 1)]


def test_work_without_copies_is_handed_back_without_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mover, "GROUP_BYTES", {"down": 200, "up": 200})
    fake: Any = FakeDriver()
    clean = [Work(0, (), 100, number) for number in range(4)]
    moved = move(fake, Ring(fake), [*clean, work(1000, 0), work(2000, 0)], "down")
    assert [each.subject for each in moved] == [0, 1, 2, 3, 1000, 2000]
    assert [entry[0] for entry in fake.log] == ["down", "down", "event", "landed"]
