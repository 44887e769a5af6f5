"""The source of the packing kernels, run on the host thread by thread as a device would."""

from __future__ import annotations

import ctypes
import mmap
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm.packing.layout import Header, Layout
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
    """Runs them on memory that ends where it may not be touched."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._start = host.reserve(3 * ROOM_BYTES)
        for at in (self._start, self._start + 2 * ROOM_BYTES - ROOM_BYTES // 2):
            host.map_memory(at, ROOM_BYTES // 2)

    def close(self) -> None:
        host.release(self._start, 3 * ROOM_BYTES)

    def _put(self, data: bytes, first: bool = True) -> int:
        """Place bytes at a multiple of 16; behind up to 15 others nothing is mapped."""
        end = self._start + (ROOM_BYTES // 2 if first else 2 * ROOM_BYTES)
        address = end - (len(data) + 15) // 16 * 16
        ctypes.memmove(address - 64, GUARD, 64)
        ctypes.memmove(address, data + GUARD[: -len(data) % 16], end - address)
        return address

    def _take(self, address: int, size_bytes: int) -> bytes:
        assert ctypes.string_at(address - 64, 64) == GUARD
        found = ctypes.string_at(address, (size_bytes + 15) // 16 * 16)
        assert found[size_bytes:] == GUARD[: -size_bytes % 16]
        return found[:size_bytes]

    def pack(
        self, data: bytes, layout: Layout, capacity_bytes: int, changed: bytes | None = None
    ) -> bytes:
        source, target = self._put(data), self._put(b"\xee" * capacity_bytes, first=False)
        tiles = -(-len(data) // layout.element_bytes // TILE)
        keep = ctypes.create_string_buffer((changed or b"") + bytes(32))
        other = ctypes.addressof(keep) + -ctypes.addressof(keep) % 16
        ctypes.memmove(other, changed or b"", len(changed or b""))
        self._library.pack_on_host(
            *(ctypes.c_void_p(source), ctypes.c_void_p(source if changed is None else other)),
            *(ctypes.c_uint64(len(data)), layout.code, tiles),
            *(ctypes.c_void_p(target), ctypes.c_uint64(capacity_bytes)),
        )
        assert self._take(source, len(data)) == data, "it is only read"
        return self._take(target, capacity_bytes)

    def unpack(self, packed: bytes, size_bytes: int) -> bytes:
        source, target = self._put(packed), self._put(b"\xdd" * size_bytes, first=False)
        self._library.unpack_on_host(
            *(ctypes.c_void_p(source), ctypes.c_uint64(len(packed))),
            *(ctypes.c_void_p(target), ctypes.c_uint64(size_bytes)),
            max(1, -(-size_bytes // (2 * TILE))),
        )
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
            self._library.count_on_host(table, len(datas), blocks, found)
        else:
            self._library.survey_on_host(table, len(datas), found)
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
@given(NAMES, NAMES, SIZES, SEEDS, LAYOUTS)
def test_what_changes_while_it_is_packed_goes_nowhere_else(
    kernels: Kernels, before: str, after: str, size: int, seed: int, layout: Layout
) -> None:
    """Between two launches: whatever it is packed to, it can be unpacked, to as many bytes."""
    data, changed = contents(before, size, seed), contents(after, size, seed)
    expected = reference_pack(data, *triple(layout))
    packed = kernels.pack(data, layout, len(expected), changed)
    table_end = layout.packed_bytes(size, 0) - layout.packed_bytes(0, 0) + 48
    assert len(packed) == len(expected)
    assert packed[:32] == expected[:32]
    assert kernels.unpack(packed, size) == kernels.unpack(packed, size)
    assert table_end >= 48


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


def test_many_tiles(kernels: Kernels) -> None:
    """More than one step of the launch that adds up what tiles have."""
    layout, generator = Layout(2, 1, 3), np.random.default_rng(1)
    data = generator.integers(0, 7, 4 * 4096 + 100).astype(np.uint8).tobytes()
    assert kernels.rows([data], [layout], 3) == [(reference_escapes(data, 2, 1, 3), 0)]


@pytest.mark.parametrize("size_bytes", [1, 2, 15, 16, 17, 4095, 8192, 8200])
def test_nothing_behind_the_end_is_read(kernels: Kernels, size_bytes: int) -> None:
    """The page behind is not there: reading it would end this process."""
    start = host.reserve(2 * mmap.PAGESIZE * 4)
    host.map_memory(start, mmap.PAGESIZE * 4)
    try:
        address = start + 4 * mmap.PAGESIZE - (size_bytes + 15) // 16 * 16
        table = (ctypes.c_uint64 * 2)(address, size_bytes | Layout(2, 3, 0).code >> 8 << 40)
        found = (ctypes.c_uint64 * 2)()
        kernels._library.survey_on_host(table, 1, found)
        kernels._library.count_on_host(table, 1, 2, found)
        assert found[0] in (0, 1) or size_bytes > 4
    finally:
        host.release(start, 8 * mmap.PAGESIZE)
