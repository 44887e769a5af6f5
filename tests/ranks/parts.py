"""What tests of ranks share: filled backends, faults at every step, what has to hold after one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from sleepbackends import BackendState, Control, SleepBackendsError
from sleepbackends.host.backend import HostBackend
from sleepbackends.ranks import RankGroup
from sleepbackends.testing import FaultInjector, SimulatedBackend

SIZE = 1 << 16
TAGS = ("weights", "lora", "kv_cache")
CONTENTS = ("weights", "lora")
"""The tags whose bytes a sleep at level 1 keeps."""


class Parts:
    """A backend with two blocks of every tag, whose bytes depend on the rank."""

    def __init__(self, backend: Any, rank: int, device: int | None = None) -> None:
        self.backend = backend
        self.rank = rank
        self.blocks: dict[str, list[Any]] = {}
        self._faults: FaultInjector | None = None
        for tag in TAGS:
            with backend.region(tag, *([] if device is None else [device])) as region:
                self.blocks[tag] = [region.buffer(SIZE) for _ in range(2)]
        for tag in TAGS:
            self.fill(tag)

    def bytes_of(self, tag: str) -> bytes:
        return bytes([TAGS.index(tag) + 16 * (self.rank + 1)]) * SIZE

    def fill(self, tag: str) -> None:
        for block in self.blocks[tag]:
            if isinstance(block, memoryview):
                block[:] = self.bytes_of(tag)
            else:
                block.write(self.bytes_of(tag))

    def holds(self, tag: str) -> bool:
        """Whether all bytes of a tag are what they were."""
        read = [b.tobytes() if isinstance(b, memoryview) else b.read() for b in self.blocks[tag]]
        return read == [self.bytes_of(tag)] * 2

    def break_at(self, faults: dict[str, list[int]]) -> int:
        """Make steps fail from now on; return how often they did since the last time."""
        fired = 0
        if self._faults is not None:
            self._faults.__exit__(None, None, None)
            fired, self._faults = self._faults.fired, None
        if faults:
            self._faults = FaultInjector(self.backend, faults)
            self._faults.__enter__()
        return fired


def simulated(count: int) -> list[Parts]:
    return [Parts(SimulatedBackend(), rank) for rank in range(count)]


def host(rank: int) -> Parts:
    return Parts(HostBackend(), rank)


def residencies(state: BackendState) -> dict[int, dict[str, frozenset[str]]]:
    """Where each rank has each tag."""
    return {
        number: {name: frozenset(r.value for r in tag.residencies) for name, tag in of.tags.items()}
        for number, of in state.ranks.items()
    }


def alike(state: BackendState) -> bool:
    """Whether all ranks have everything in the same residency."""
    places = list(residencies(state).values())
    return all(place == places[0] for place in places)


FAULTS = {
    "suspend": [
        ("synchronize", 0),
        ("check_room_to_save", 0),
        ("save", 0),
        ("save", 2),
        ("unmap", 0),
        ("unmap", 3),
        ("unmap", 4),
        ("unmap", 5),
    ],
    "resume": [
        ("reserve", 0),
        ("map", 0),
        ("map", 5),
        ("restore", 0),
        ("restore", 3),
        ("fill", 0),
        ("synchronize", 0),
    ],
    "discard": [("synchronize", 0), ("unmap", 0), ("unmap", 1)],
}
"""By verb the steps of a mechanism and which of their calls fails; four blocks are saved, the
two of the KV cache are dropped."""

UNDONE = {
    ("suspend", step, call) for step, call in FAULTS["suspend"] if (step, call) < ("unmap", 4)
}
UNDONE |= {("resume", step, call) for step, call in FAULTS["resume"]}
UNDONE |= {("discard", "synchronize", 0)}
"""The faults after which every rank is exactly as before: nothing had been dropped yet."""


def verbs(group: RankGroup) -> dict[str, Callable[[], Any]]:
    """The calls in which a rank fails."""

    def limit() -> Control:
        return Control(timeout_s=DEADLINE_S)

    return {
        "suspend": lambda: group.suspend(1, control=limit()),
        "resume": lambda: group.resume(control=limit()),
        "discard": lambda: group.discard(["kv_cache"], control=limit()),
    }


def each_fault() -> Iterator[tuple[str, str, int]]:
    for verb, faults in FAULTS.items():
        for step, call in faults:
            yield verb, step, call


DEADLINE_S = 20.0
"""Of a call in which a rank fails."""


def check_fault(
    group: RankGroup,
    verb: str,
    step: str,
    call: int,
    break_at: Callable[[dict[str, Any]], int],
    rank: int = 1,
    undone: Collection[tuple[str, str, int]] = frozenset(UNDONE),
) -> None:
    """Have one rank fail at a step; all are as before, or the error says where they differ.

    Whatever fails of a suspend, all are awake, and whatever fails of a resume, all are asleep.
    Afterwards the same call succeeds, and everything is awake again.
    """
    if verb == "resume":
        group.suspend(1)
    before = residencies(group.state())
    break_at({step: [call]})
    error = None
    started = time.monotonic()
    try:
        verbs(group)[verb]()
    except SleepBackendsError as raised:
        error = raised
    what = f"{verb}, {step} {call}: {error!r}"
    assert time.monotonic() - started < DEADLINE_S, what
    assert break_at({}) == 1, f"the fault came nowhere: {what}"
    assert error is not None, what
    assert f"rank {rank}: " in error.message, what
    group.refresh()
    after = residencies(group.state())
    if (verb, step, call) in undone:
        assert after == before, what
        assert not error.report.changed, what
    else:
        assert error.report.changed, what
        assert verb != "resume", what
        assert error.report.ranks.keys() == after.keys(), what
        for number, report in error.report.ranks.items():
            told = {
                name: frozenset(r.value for r in c.after.residencies)
                for name, c in report.tags.items()
            }
            assert told == {name: after[number][name] for name in told}, what
    if verb == "suspend":
        assert not group.state().asleep_tags(), what
    for name in TAGS:
        if len({tags[name] for tags in after.values()}) > 1:
            assert f"{name!r} is " in error.message, what
    if verb != "suspend":
        verbs(group)[verb]()
    group.resume()
    group.mark_valid(["kv_cache"])
    assert alike(group.state()), what
    assert not group.state().unusable_tags(), what
