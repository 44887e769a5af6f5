"""The source of the packing kernels, run on the host thread by thread as a device would."""

from __future__ import annotations

import ctypes
import mmap
import random
import shutil
import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm import address_space
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.packing import host as host_packing
from sleepbackends.vmm.packing.layout import MOST_BYTES, Header, Layout
from tests.native.build import compile_kernels
from tests.packing import (
    CONTENTS,
    contents,
    reference_escapes,
    reference_pack,
    reference_survey,
)

TILE = 4096
GUARD = b"\xa5" * 64
ROOM_BYTES = 1 << 18

LAYOUTS = st.builds(Layout, st.sampled_from([2, 4]), st.integers(1, 7), st.integers(0, 255))
NAMES = st.sampled_from(list(CONTENTS))
SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.one_of(st.integers(0, 600), st.integers(8100, 8300), st.integers(0, 50_000))


class Kernels:
    """Runs them on memory behind which nothing is mapped."""

    def __init__(self, library: Any) -> None:
        p, n, w = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint
        library.survey_on_host.argtypes = (p, w, p)
        library.count_on_host.argtypes = (p, w, w, p)
        library.tally_on_host.argtypes = (p, n, w, p, w, w)
        library.prefix_on_host.argtypes = (p, n, w, p, n)
        library.pack_on_host.argtypes = (p, n, w, p, n, w, w)
        library.unpack_on_host.argtypes = (p, n, p, n, w, w)
        self.library = library
        self._start = host.reserve(3 * ROOM_BYTES)
        self._ends = [self._start + ROOM_BYTES, self._start + 3 * ROOM_BYTES]
        for end in self._ends:
            host.map_memory(end - ROOM_BYTES, ROOM_BYTES)

    def close(self) -> None:
        host.release(self._start, 3 * ROOM_BYTES)

    def _put(self, data: bytes, place: int) -> int:
        """Place bytes at a multiple of 16; behind up to 15 others nothing is mapped."""
        address = self._ends[place] - (len(data) + 15) // 16 * 16
        ctypes.memmove(address - 64, GUARD, 64)
        ctypes.memmove(address, data + GUARD[: -len(data) % 16], self._ends[place] - address)
        return address

    def _take(self, address: int, size_bytes: int) -> bytes:
        assert ctypes.string_at(address - 64, 64) == GUARD
        found = ctypes.string_at(address, (size_bytes + 15) // 16 * 16)
        assert found[size_bytes:] == GUARD[: -size_bytes % 16]
        return found[:size_bytes]

    def pack(
        self, data: bytes, layout: Layout, capacity_bytes: int, changed: bytes | None = None
    ) -> bytes:
        """Pack bytes that are others when the last launch begins."""
        source, target = self._put(data, 0), self._put(b"\xee" * capacity_bytes, 1)
        tiles = -(-(len(data) // layout.element_bytes) // TILE)
        what = (source, len(data), layout.code, target)
        self.library.tally_on_host(*what, 0, tiles)
        self.library.prefix_on_host(*what, capacity_bytes)
        if changed is not None:
            ctypes.memmove(source, changed, len(changed))
        self.library.pack_on_host(*what, capacity_bytes, 0, tiles)
        assert self._take(source, len(data)) == (data if changed is None else changed)
        return self._take(target, capacity_bytes)

    def unpack(self, packed: bytes, size_bytes: int) -> bytes:
        source, target = self._put(packed, 0), self._put(b"\xdd" * size_bytes, 1)
        tiles = max(1, -(-size_bytes // (2 * TILE)))
        self.library.unpack_on_host(source, len(packed), target, size_bytes, 0, tiles)
        assert self._take(source, len(packed)) == packed, "it is only read"
        return self._take(target, size_bytes)

    def rows(self, datas: Sequence[bytes], layouts: Sequence[Layout], blocks: int = 0) -> list[Any]:
        """Survey, or count with so many blocks for each."""
        memory = [ctypes.create_string_buffer(data + bytes(32)) for data in datas]
        words = []
        for buffer, data, layout in zip(memory, datas, layouts, strict=True):
            address = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % 16
            ctypes.memmove(address, data, len(data))
            words += [address, len(data) | layout.code >> 8 << 40]
        table = (ctypes.c_uint64 * len(words))(*words)
        found = (ctypes.c_uint64 * (len(words) + 2))()
        if blocks:
            self.library.count_on_host(table, len(datas), blocks, found)
        else:
            self.library.survey_on_host(table, len(datas), found)
        assert list(found[-2:]) == [0, 0]
        return list(zip(found[:-2:2], found[1:-2:2], strict=True))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    output = tmp_path_factory.mktemp("kernels") / "kernels.so"
    kernels = Kernels(ctypes.CDLL(str(compile_kernels(output, "packing"))))
    yield kernels
    kernels.close()


def triple(layout: Layout) -> tuple[int, int, int]:
    return layout.element_bytes, layout.planes, layout.base


@settings(max_examples=60, deadline=None)
@given(NAMES, SIZES, SEEDS, LAYOUTS, st.integers(0, 40))
def test_they_pack_and_unpack(
    kernels: Kernels, name: str, size: int, seed: int, layout: Layout, more: int
) -> None:
    data = contents(name, size, seed)
    expected = reference_pack(data, *triple(layout))
    packed = kernels.pack(data, layout, len(expected) + more)
    assert packed == expected + b"\xee" * more
    assert kernels.unpack(packed, len(data)) == data


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("planes", range(1, 8))
def test_every_element_of_16_bits(kernels: Kernels, element_bytes: int, planes: int) -> None:
    data = contents("all elements", 131_000 // element_bytes, planes)
    layout = Layout(element_bytes, planes, 250)
    expected = reference_pack(data, *triple(layout))
    assert kernels.pack(data, layout, len(expected)) == expected
    assert kernels.unpack(expected, len(data)) == data


@settings(max_examples=40, deadline=None)
@given(NAMES, SIZES, SEEDS, LAYOUTS, st.data())
def test_without_room_for_all_escapes_the_header_says_so(
    kernels: Kernels, name: str, size: int, seed: int, layout: Layout, draw: st.DataObject
) -> None:
    data = contents(name, size, seed)
    whole = reference_pack(data, *triple(layout))
    room = draw.draw(st.integers(layout.packed_bytes(size, 0), len(whole)))
    packed = kernels.pack(data, layout, room)
    header = Header.read(packed)
    assert header is not None
    assert header.packed_bytes == len(whole)
    assert header.is_whole == (room == len(whole))
    assert packed[4:] == whole[4:room]
    if not header.is_whole:
        assert kernels.unpack(packed, size) == b"\xdd" * size


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(NAMES, NAMES), max_size=4), SEEDS, LAYOUTS, st.integers(0, 3000))
def test_what_changes_while_it_is_packed_goes_nowhere_else(
    kernels: Kernels, tiles: list[tuple[str, str]], seed: int, layout: Layout, cut: int
) -> None:
    """Between two launches, each tile to something else; it can be unpacked to something."""
    tile_bytes = TILE * layout.element_bytes
    before, then = (
        b"".join(contents(names[number], tile_bytes, seed + number) for names in tiles)
        for number in (0, 1)
    )
    size = max(0, len(before) - cut)
    data, changed = before[:size], then[:size]
    expected, other = (reference_pack(each, *triple(layout)) for each in (data, changed))
    packed = kernels.pack(data, layout, len(expected), changed)
    table_end = 32 + 4 * len(table := table_of(expected, layout, size))
    escapes_at = fixed_bytes(layout, size)
    assert packed[:table_end] == expected[:table_end]
    assert packed[table_end:escapes_at] == other[table_end:escapes_at]
    # Of its new escapes each tile has as many as it had before.
    found, new = packed[escapes_at:], other[escapes_at:]
    after = table_of(other, layout, size)
    for (start, end), (first, last) in zip(pairwise(table), pairwise(after), strict=True):
        kept = new[first : min(last, first + end - start)]
        assert found[start:end] == kept + b"\xee" * (end - start - len(kept))
    assert len(kernels.unpack(packed, size)) == size


def table_of(packed: bytes, layout: Layout, size_bytes: int) -> list[int]:
    tiles = -(-(size_bytes // layout.element_bytes) // TILE)
    return list(struct.unpack_from(f"<{-(-(tiles + 1) // 4) * 4}I", packed, 32))


def fixed_bytes(layout: Layout, size_bytes: int) -> int:
    """Where escapes begin."""
    return layout.packed_bytes(size_bytes, 16) - 16


@settings(max_examples=60, deadline=None)
@given(NAMES, SIZES, SEEDS, LAYOUTS, st.data())
def test_damaged_bytes_do_no_harm(
    kernels: Kernels, name: str, size: int, seed: int, layout: Layout, draw: st.DataObject
) -> None:
    """The guards and the pages behind tell; what is refused leaves the target alone."""
    packed = bytearray(reference_pack(contents(name, size, seed), *triple(layout)))
    most = draw.draw(st.sampled_from([32, 64, len(packed)]))
    for _ in range(draw.draw(st.integers(1, 5))):
        at = draw.draw(st.integers(0, min(most, len(packed)) - 1))
        packed[at] = draw.draw(st.integers(0, 255))
    cut = draw.draw(st.one_of(st.just(len(packed)), st.integers(32, len(packed))))
    found = kernels.unpack(bytes(packed[:cut]), size)
    header = Header.read(bytes(packed))
    good = header is not None and header.is_whole and header.size_bytes == size
    if not good or header is None or header.packed_bytes > cut:
        assert found == b"\xdd" * size


def test_escapes_that_are_elsewhere_are_zeros(kernels: Kernels) -> None:
    """A table may say anything; nothing behind the last escape is read."""
    data, layout = contents("outliers", 3 * 8192, 1), Layout(2, 2, 118)
    packed = bytearray(reference_pack(data, *triple(layout)))
    struct.pack_into("<I", packed, 32 + 4, 0x80000000)
    elements = np.frombuffer(data, "<u2").copy()
    second = elements[TILE : 2 * TILE]
    second[((second >> 7 & 255) - 118) % 256 >= 3] &= 0x807F
    assert kernels.unpack(bytes(packed), len(data)) == elements.tobytes()


@pytest.mark.parametrize("byte", [0x00, 0x3C, 0xFF])
def test_a_window_that_begins_at_any_top_byte(kernels: Kernels, byte: int) -> None:
    data = bytes([byte]) * 4096
    ((code, escapes),) = kernels.rows([data], [Layout(2, 1, 0)])
    top = (byte << 8 | byte) >> 7 & 255
    assert (Layout.of(code), escapes) == (Layout(2, 1, top), 0)


def test_a_span_of_another_size_is_left_alone(kernels: Kernels) -> None:
    packed = reference_pack(contents("weights", 5000, 1), 2, 3, 117)
    for size in (0, 4998, 4999, 5001, 20_000):
        assert kernels.unpack(packed, size) == b"\xdd" * size


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(NAMES, st.one_of(SIZES, st.integers(0, 400_000)), SEEDS), max_size=3),
    LAYOUTS,
    st.integers(1, 4),
)
def test_they_survey_and_count(
    kernels: Kernels, wanted: list[tuple[str, int, int]], layout: Layout, blocks: int
) -> None:
    datas = [contents(*each) for each in wanted]
    layouts = [layout] * len(datas)
    for data, (code, escapes) in zip(datas, kernels.rows(datas, layouts), strict=True):
        expected = reference_survey(data)
        found = (triple(Layout.of(code)), escapes) if code else None
        assert found == expected
    counted = kernels.rows(datas, layouts, blocks)
    assert counted == [(reference_escapes(data, *triple(layout)), 0) for data in datas]


@pytest.mark.parametrize("tiles", [1, 3, 511, 512, 513, 1500])
def test_what_many_tiles_have_is_added_up(kernels: Kernels, tiles: int) -> None:
    layout, source = Layout(4, 2, 7), random.Random(tiles)  # noqa: S311 - test data
    size_bytes = 4 * (TILE * tiles - 1) + 3
    counts = [source.randrange(TILE) for _ in range(tiles)]
    data, packed = Sparse(size_bytes), Sparse(layout.packed_bytes(size_bytes, sum(counts)))
    data.write(size_bytes - 3, b"end")
    packed.write(32, struct.pack(f"<{tiles}I", *counts))
    what = (data.address, size_bytes, layout.code, packed.address)
    kernels.library.prefix_on_host(*what, packed.size_bytes)
    header = Header.read(packed.read(0, 32))
    assert header == (layout, size_bytes, sum(counts), True)
    assert packed.read(20, 12) == b"end" + bytes(9)
    entries = struct.unpack(f"<{tiles + 1}I", packed.read(32, 4 * (tiles + 1)))
    assert list(entries) == [0, *accumulate(counts)]
    data.close()
    packed.close()


class Sparse:
    """Much memory, of which only what is touched is there."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._room = host.round_up(size_bytes, mmap.PAGESIZE)
        self.address = host.reserve(self._room)
        host.map_memory(self.address, self._room)

    def write(self, offset: int, data: bytes) -> None:
        ctypes.memmove(self.address + offset, data, len(data))

    def read(self, offset: int, size_bytes: int) -> bytes:
        return ctypes.string_at(self.address + offset, size_bytes)

    def close(self) -> None:
        host.release(self.address, self._room)


@pytest.mark.parametrize("layout", [Layout(2, 3, 118), Layout(4, 7, 40)], ids=str)
def test_the_last_tiles_of_the_largest_span(
    kernels: Kernels, native_library: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    """Numbers of bytes need more than 32 bits there, and so do offsets of packed ones."""
    monkeypatch.setattr(address_space, "_FOLDER", native_library.parent)
    size_bytes, element_bytes = MOST_BYTES, layout.element_bytes
    tile_bytes = TILE * element_bytes
    tiles, last = size_bytes // tile_bytes, 2
    end = contents("outliers", last * tile_bytes, 5)
    small = reference_pack(end, *triple(layout))
    escapes = reference_escapes(end, *triple(layout))
    assert escapes
    data, back = Sparse(size_bytes), Sparse(size_bytes)
    packed = Sparse(layout.packed_bytes(size_bytes, escapes))
    data.write(size_bytes - len(end), end)
    what = (data.address, size_bytes, layout.code, packed.address)
    kernels.library.tally_on_host(*what, tiles - last, last)
    # All but the last tiles are as if they had no escapes.
    kernels.library.prefix_on_host(*what, packed.size_bytes)
    kernels.library.pack_on_host(*what, packed.size_bytes, tiles - last, last)

    octets, few = size_bytes // element_bytes // 8, len(end) // element_bytes // 8
    at, small_at = fixed_bytes(layout, size_bytes), fixed_bytes(layout, len(end))
    assert packed.read(at, packed.size_bytes - at) == small[small_at:]
    for _ in range(element_bytes - 1):
        at, small_at = at - 8 * octets, small_at - 8 * few
        assert packed.read(at + 8 * (octets - few), 8 * few) == small[small_at:][: 8 * few]
    for _ in range(layout.planes):
        at, small_at = at - octets, small_at - few
        assert packed.read(at + octets - few, few) == small[small_at:][:few]

    source = (packed.address, packed.size_bytes)
    first = size_bytes // (2 * TILE) - last if element_bytes == 2 else tiles - last
    kernels.library.unpack_on_host(*source, back.address, size_bytes, first, last)
    assert back.read(size_bytes - len(end), len(end)) == end
    on_host = ctypes.create_string_buffer(len(end))
    offset = size_bytes - len(end)
    host_packing.unpack(Span(*source), ctypes.addressof(on_host), len(end), offset)
    assert on_host.raw == end
    for each in (data, packed, back):
        each.close()


@pytest.mark.parametrize("size_bytes", [1, 2, 15, 16, 17, 4095, 8192, 8200])
def test_nothing_behind_the_end_is_read(kernels: Kernels, size_bytes: int) -> None:
    """The page behind is not there: reading it would end this process."""
    start = host.reserve(4 * mmap.PAGESIZE)
    host.map_memory(start, 3 * mmap.PAGESIZE)
    address = start + 3 * mmap.PAGESIZE - (size_bytes + 15) // 16 * 16
    table = (ctypes.c_uint64 * 2)(address, size_bytes | Layout(2, 3, 1).code >> 8 << 40)
    found = (ctypes.c_uint64 * 2)()
    kernels.library.survey_on_host(table, 1, found)
    found[0] = 0
    kernels.library.count_on_host(table, 1, 2, found)
    assert found[0] == size_bytes // 2, "zeros are outside of the window"
    host.release(start, 4 * mmap.PAGESIZE)
