"""How blocks are cut into chunks, what room each gets, and what does not lie in one piece."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from sleepbackends.vmm.fingerprint import host_fingerprint
from sleepbackends.vmm.host_copy import cut, laid_out
from sleepbackends.vmm.joined import Joined, first_bytes
from sleepbackends.vmm.segment import Piece

BASE = 1 << 20


class Range(NamedTuple):
    """Some bytes of a buffer."""

    buffer: ctypes.Array[Any]
    offset: int
    size_bytes: int
    has_failed: bool = False

    def part(self, start: int, size_bytes: int) -> Range:
        assert 0 < size_bytes <= self.size_bytes - start
        return Range(self.buffer, self.offset + start, size_bytes, self.has_failed)

    def pieces(self) -> Iterator[Piece]:
        yield Piece(ctypes.addressof(self.buffer) + self.offset, self.size_bytes, True)

    def wait(self) -> None:
        pass

    def is_followed_by(self, other: object) -> bool:
        return False

    def fingerprinting(self) -> Callable[[], int]:
        raise AssertionError("laying bytes out looks at none")

    def view(self, start: int, size_bytes: int) -> memoryview:
        assert start + size_bytes <= self.size_bytes
        first = self.offset + start
        return memoryview(self.buffer).cast("B")[first : first + size_bytes]


RANGES = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 900)), max_size=6)
UNITS = st.sampled_from([1, 64])


@given(gaps=RANGES, most=st.integers(1, 64), unit=UNITS, data=st.data(), rooms=st.integers(1, 900))
@settings(max_examples=200, deadline=None)
def test_every_byte_has_room_of_its_own(
    gaps: list[tuple[int, int]], most: int, unit: int, data: st.DataObject, rooms: int
) -> None:
    most *= unit
    ranges, at = [], 0
    for gap, size in gaps:
        ranges.append((at + gap, size))
        at += gap + size
    spans = cut(BASE, ranges, most)
    assert [(s.address, s.size_bytes) for s in spans] == [
        (BASE + first, min(most, offset + size - first))
        for offset, size in ranges
        for first in range(offset, offset + size, most)
    ]
    packed = data.draw(st.lists(st.booleans(), min_size=len(spans), max_size=len(spans)))
    sizes = [
        -(-(span.size_bytes * 3 // 4 + 1 if pack else span.size_bytes) // unit) * unit
        for span, pack in zip(spans, packed, strict=True)
    ]
    total = sum(sizes)
    buffer = ctypes.create_string_buffer(total + 1)
    step = rooms * unit
    free = [Range(buffer, first, min(step, total - first)) for first in range(0, total, step)]
    chunks = list(laid_out(spans, sizes, free, unit))
    taken = [(part.offset, part.size_bytes) for chunk in chunks for part in chunk.room]
    assert [offset for offset, _ in taken] == [
        sum(s for _, s in taken[:i]) for i in range(len(taken))
    ]
    assert sum(size for _, size in taken) == total, "all of it, and each byte once"
    assert all(offset % unit == 0 for offset, _ in taken)
    covered = [(c.span.address, c.span.size_bytes) for c in chunks]
    assert sum(size for _, size in covered) == sum(span.size_bytes for span in spans)
    assert covered == sorted(covered)
    whole = set(spans)
    for chunk in chunks:
        room = sum(part.size_bytes for part in chunk.room)
        assert chunk.saved.size_bytes <= room
        if room < chunk.size_bytes:
            assert chunk.span in whole, "what is packed is not cut"
        else:
            assert len(chunk.room) == 1
            assert not chunk.is_packed


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), data=st.data())
@settings(max_examples=200, deadline=None)
def test_several_ranges_are_as_good_as_one(sizes: list[int], data: st.DataObject) -> None:
    total = sum(sizes)
    contents = bytes(range(1, total + 1))
    room = []
    for index, size in enumerate(sizes):
        first = sum(sizes[:index])
        room.append(Range(ctypes.create_string_buffer(contents[first : first + size]), 0, size))
    count = data.draw(st.integers(1, total))
    saved = first_bytes(room, count)
    assert saved.size_bytes == count
    assert isinstance(saved, Joined) == (count > sizes[0])
    assert sum(piece.size_bytes for piece in saved.pieces()) == count
    start = data.draw(st.integers(0, count - 1))
    size = data.draw(st.integers(1, count - start))
    assert saved.view(start, size) == contents[start : start + size]
    if isinstance(saved, Joined):
        copy = ctypes.create_string_buffer(contents[:count], count)
        assert saved.fingerprinting()() == host_fingerprint(ctypes.addressof(copy), count)
        assert not saved.has_failed
        assert Joined([*room[:1], room[0]._replace(has_failed=True)]).has_failed
        assert not saved.is_followed_by(saved)
        saved.wait()


def test_a_chunk_that_is_overwritten_is_no_longer_what_it_was() -> None:
    buffer = ctypes.create_string_buffer(64)
    (chunk,) = laid_out(cut(BASE, [(0, 64)], 64), [48], [Range(buffer, 0, 48)], 1)
    known = replace(chunk, fingerprint=7)
    known.overwrite(40)
    assert known.fingerprint is None
    chunk.overwrite(40)
    assert (chunk.saved.size_bytes, chunk.is_packed) == (40, True)
    assert chunk.writes == 1
    chunk.room = [*chunk.room, Range(buffer, 48, 16)]
    assert chunk.saved.size_bytes == 40, "more room changes nothing"
    chunk.overwrite(64)
    assert chunk.saved.size_bytes == 64
