"""Packing in host memory: the format that is written down, whatever the bytes, there and back."""

from __future__ import annotations

import ctypes
import mmap
import struct
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sleepbackends.errors import BackendUnavailableError, ContentsLostError, RequestError
from sleepbackends.hostmemory import driver as memory
from sleepbackends.vmm import address_space
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.packing import host
from sleepbackends.vmm.packing.layout import MOST_BYTES, Header, Layout
from tests.packing import (
    CONTENTS,
    contents,
    reference_escapes,
    reference_pack,
    reference_survey,
    reference_unpack,
)

GUARD = b"\xa5" * 64

LAYOUTS = st.builds(Layout, st.sampled_from([2, 4]), st.integers(1, 7), st.integers(0, 255))
SIZES = st.one_of(st.integers(0, 600), st.integers(8000, 8400), st.integers(0, 70_000))
NAMES = st.sampled_from(list(CONTENTS))
SEEDS = st.integers(0, 2**32 - 1)


class Buffer:
    """Bytes at any address, between others that nobody may touch."""

    def __init__(self, data: bytes, offset: int = 0) -> None:
        self._memory = ctypes.create_string_buffer(GUARD + bytes(16) + data + GUARD + bytes(80))
        base = ctypes.addressof(self._memory)
        self.address = base + -base % 64 + 64 + offset
        self.size_bytes = len(data)
        ctypes.memmove(self.address - 64, GUARD + data + GUARD, len(data) + 128)

    @property
    def span(self) -> Span:
        return Span(self.address, self.size_bytes)

    @property
    def data(self) -> bytes:
        assert ctypes.string_at(self.address - 64, 64) == GUARD
        assert ctypes.string_at(self.address + self.size_bytes, 64) == GUARD
        return ctypes.string_at(self.address, self.size_bytes)


def pack(data: bytes, layout: Layout, offset: int = 0) -> bytes:
    source = Buffer(data, offset)
    room = Buffer(b"\xee" * layout.packed_bytes(len(data), host.count(source.span, layout)), offset)
    assert host.pack(source.span, layout, room.address, room.size_bytes) == room.size_bytes
    assert source.data == data, "it is only read"
    return room.data


def unpack(packed: bytes, size_bytes: int, start: int = 0, offset: int = 0) -> bytes:
    source, target = Buffer(packed, offset), Buffer(b"\xdd" * size_bytes, offset)
    try:
        host.unpack(source.span, target.address, size_bytes, start)
    except ContentsLostError:
        assert target.data == b"\xdd" * size_bytes
        raise
    return target.data


class Case(NamedTuple):
    data: bytes
    layout: Layout


CASES = st.builds(
    lambda name, size, seed, layout: Case(contents(name, size, seed), layout),
    NAMES,
    SIZES,
    SEEDS,
    LAYOUTS,
)


@settings(max_examples=300, deadline=None)
@given(CASES, st.integers(0, 15))
def test_it_is_the_format_and_comes_back(case: Case, offset: int) -> None:
    data, layout = case
    packed = pack(data, layout, offset)
    triple = (layout.element_bytes, layout.planes, layout.base)
    assert packed == reference_pack(data, *triple)
    header = Header.read(packed)
    assert header == (layout, len(data), reference_escapes(data, *triple), True)
    assert header.packed_bytes == len(packed)
    assert reference_unpack(packed) == data
    assert unpack(packed + b"behind", len(data), offset=offset) == data


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("planes", range(1, 8))
@pytest.mark.parametrize("base", [0, 1, 100, 130, 255])
def test_every_element_of_16_bits(element_bytes: int, planes: int, base: int) -> None:
    data = contents("all elements", 131_072 + element_bytes - 1, 1)
    packed = pack(data, Layout(element_bytes, planes, base))
    assert packed == reference_pack(data, element_bytes, planes, base)
    assert unpack(packed, len(data)) == data


@settings(max_examples=100, deadline=None)
@given(CASES, st.data())
def test_any_part_comes_back_alone(case: Case, draw: st.DataObject) -> None:
    packed = pack(*case)
    start = draw.draw(st.integers(0, len(case.data)))
    end = draw.draw(st.integers(start, len(case.data)))
    assert unpack(packed, end - start, start) == case.data[start:end]
    with pytest.raises(ContentsLostError, match="damaged"):
        unpack(packed, len(case.data) + 1 - start, start)


@settings(max_examples=200, deadline=None)
@given(CASES, st.data())
def test_damage_stays_inside(case: Case, draw: st.DataObject) -> None:
    """Damaged bytes are refused, or unpacked to something, but nothing else is touched."""
    packed = bytearray(pack(*case))
    most = draw.draw(st.sampled_from([32, 64, len(packed)]))
    for _ in range(draw.draw(st.integers(1, 5))):
        packed[draw.draw(st.integers(0, min(most, len(packed)) - 1))] = draw.draw(
            st.integers(0, 255)
        )
    cut = draw.draw(st.one_of(st.just(len(packed)), st.integers(0, len(packed))))
    try:
        unpack(bytes(packed[:cut]), len(case.data))
    except ContentsLostError:
        pass
    else:
        header = Header.read(bytes(packed))
        assert header is not None
        assert header.packed_bytes <= cut


@settings(max_examples=100, deadline=None)
@given(CASES, st.data())
def test_without_room_for_all_escapes_the_header_says_so(case: Case, draw: st.DataObject) -> None:
    data, layout = case
    whole = pack(data, layout)
    least = layout.packed_bytes(len(data), 0)
    room = Buffer(b"\xee" * draw.draw(st.integers(max(0, least - 40), len(whole) + 3)))
    source = Buffer(data)
    try:
        needed = host.pack(source.span, layout, room.address, room.size_bytes)
    except RequestError:
        assert room.size_bytes < least
        assert room.data == b"\xee" * room.size_bytes
        return
    assert room.size_bytes >= least
    assert needed == len(whole)
    header = Header.read(room.data)
    assert header is not None
    assert header.is_whole == (room.size_bytes >= len(whole))
    assert header.packed_bytes == len(whole)
    if header.is_whole:
        assert room.data[: len(whole)] == whole
        return
    assert room.data[4:] == whole[4 : room.size_bytes]
    with pytest.raises(ContentsLostError):
        unpack(room.data + bytes(4096), len(data))


@settings(max_examples=60, deadline=None)
@given(NAMES, st.one_of(SIZES, st.integers(0, 2_000_000)), SEEDS)
def test_a_survey_takes_the_best(name: str, size: int, seed: int) -> None:
    data = contents(name, size, seed)
    source = Buffer(data)
    choice = host.survey(source.span)
    expected = reference_survey(data)
    assert (choice is None) == (expected is None)
    if choice is None:
        return
    layout = choice.layout
    assert ((layout.element_bytes, layout.planes, layout.base), choice.escapes) == expected
    assert choice.packed_bytes(size) == layout.packed_bytes(size, choice.escapes)


BITS_AN_ELEMENT = {
    "weights": (16, 10.6, 11.3),
    "fp32": (32, 26.6, 27.3),
    "fp16": (16, 13.9, 14.4),
    "subnormals": (16, 9, 9.1),
    "constant": (16, 9, 9.1),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_what_packing_saves(name: str) -> None:
    data = contents(name, 4 << 20, 3)
    source = Buffer(data)
    choice = host.survey(source.span)
    if name in ("random", "int8", "all elements"):
        assert choice is None
    if name not in BITS_AN_ELEMENT:
        return
    assert choice is not None
    packed = pack(data, choice.layout)
    bits, least, most = BITS_AN_ELEMENT[name]
    assert least < bits * len(packed) / len(data) < most
    assert abs(choice.packed_bytes(len(data)) - len(packed)) < len(data) / 1000


def test_escapes_that_are_elsewhere_are_zeros() -> None:
    """A table may say anything; nothing behind the last escape is read."""
    data, layout = contents("outliers", 3 * 8192, 1), Layout(2, 2, 118)
    packed = bytearray(pack(data, layout))
    struct.pack_into("<I", packed, 32 + 4, 0x80000000)
    elements = np.frombuffer(data, "<u2").copy()
    second = elements[4096:8192]
    second[((second >> 7 & 255) - 118) % 256 >= 3] &= 0x807F
    assert unpack(bytes(packed), len(data)) == elements.tobytes()


@pytest.mark.parametrize("byte", [0x00, 0x3C, 0xFF])
def test_a_window_that_begins_at_any_top_byte(byte: int) -> None:
    source = Buffer(bytes([byte]) * 4096)
    top = (byte << 8 | byte) >> 7 & 255
    assert host.survey(source.span) == (Layout(2, 1, top), 0)


class AtTheEnd:
    """Memory that ends where reading or writing would end this process."""

    def __init__(self) -> None:
        self._start = memory.reserve(4 * mmap.PAGESIZE)
        memory.map_memory(self._start, 3 * mmap.PAGESIZE)

    def put(self, data: bytes) -> Span:
        address = self._start + 3 * mmap.PAGESIZE - len(data)
        ctypes.memmove(address, data, len(data))
        return Span(address, len(data))

    def close(self) -> None:
        memory.release(self._start, 4 * mmap.PAGESIZE)


@pytest.mark.parametrize("size_bytes", [0, 1, 7, 15, 16, 17, 255, 4096, 8203])
def test_nothing_behind_the_end_is_touched(size_bytes: int) -> None:
    data = contents("weights", size_bytes, 1)
    source, target = AtTheEnd(), AtTheEnd()
    for layout in (Layout(2, 3, 118), Layout(4, 3, 118)):
        packed = pack(data, layout)
        host.survey(source.put(data))
        assert host.count(source.put(data), layout) == escapes(data, layout)
        span = target.put(bytes(len(packed)))
        host.pack(source.put(data), layout, span.address, span.size_bytes)
        assert ctypes.string_at(*span) == packed
        span = target.put(bytes(size_bytes))
        host.unpack(source.put(packed), span.address, size_bytes)
        assert ctypes.string_at(*span) == data
        for short in (0, 1, 31, 32, len(packed) - 1):
            with pytest.raises(ContentsLostError):
                host.unpack(source.put(packed[:short]), span.address, size_bytes)
    source.close()
    target.close()


def escapes(data: bytes, layout: Layout) -> int:
    return reference_escapes(data, layout.element_bytes, layout.planes, layout.base)


def test_what_is_too_large_is_refused() -> None:
    layout = Layout(2, 3, 118)
    assert host.survey(Span(0, MOST_BYTES + 1)) is None
    with pytest.raises(RequestError, match="cannot be packed"):
        host.pack(Span(0, MOST_BYTES + 1), layout, 0, 2 * MOST_BYTES)


def test_other_threads_run_meanwhile() -> None:
    data = Buffer(contents("weights", 1 << 20, 1) * 64)
    room = Buffer(bytes(64 << 20))
    arguments = (data.span, Layout(2, 3, 116), room.address, room.size_bytes)
    thread = threading.Thread(target=host.pack, args=arguments)
    turns = 0
    thread.start()
    while thread.is_alive():
        turns += 1
    assert turns > 1000, "this thread had to wait"


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "_FOLDER", tmp_path)
    with pytest.raises(BackendUnavailableError, match="libsleepbackends_host"):
        host.survey(Span(0, 0))
