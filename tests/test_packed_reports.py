"""How many bytes crossed the link: in the progress, in reports, and in those of several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest

from sleepbackends import Control, Orchestrator
from sleepbackends.control import Progress
from sleepbackends.ledger import Block
from sleepbackends.ranks import InProcessGroup
from sleepbackends.reports import TransitionReport
from sleepbackends.testing import SimulatedBackend

SIZE = 1000


class Packs(SimulatedBackend):
    """Says that it saves a fourth of the bytes on the way down, and half on the way up."""

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        for block in blocks:
            self.saved[block.address] = self.device.read(block.address)
            control.advance(block.size_bytes, spared_bytes=block.size_bytes // 4)
            yield block

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        for block in blocks:
            self.device.write(block.address, self.saved[block.address])
            control.advance(block.size_bytes, spared_bytes=block.size_bytes // 2)
            yield block


def packs() -> Packs:
    backend = Packs()
    with backend.region("weights") as region:
        region.buffer(SIZE)
        region.buffer(SIZE)
    return backend


def test_reports_tell_it() -> None:
    backend, seen = packs(), list[Progress]()
    down = backend.suspend(1, control=Control(on_progress=seen.append))
    assert [each.spared_bytes for each in seen] == [0, SIZE // 4, SIZE // 2]
    assert (down.copied_bytes, down.spared_bytes, down.link_bytes) == (2000, 500, 1500)
    assert down.packing_ratio == pytest.approx(0.75)
    assert down.copied_bytes_s == pytest.approx(2000 / down.seconds)
    up = backend.resume()
    assert (up.spared_bytes, up.packing_ratio) == (1000, 0.5)


def test_without_copies_there_is_no_ratio() -> None:
    report = TransitionReport(backend="b", operation="suspend", changed=False)
    assert (report.link_bytes, report.packing_ratio, report.copied_bytes_s) == (0, 1.0, 0.0)


def test_ranks_are_added_up() -> None:
    group, seen = InProcessGroup([packs(), packs(), packs()]), list[Progress]()
    report = group.suspend(1, control=Control(on_progress=seen.append))
    assert (report.copied_bytes, report.link_bytes) == (6000, 4500)
    assert {each.spared_bytes for each in report.ranks.values()} == {500}
    assert seen[-1][1:] == (6000, 6000, 0, 1500)
    assert group.resume().packing_ratio == 0.5


def test_engines_see_it() -> None:
    (step,) = Orchestrator(packs()).sleep(1).steps
    assert step.packing_ratio == 0.75
