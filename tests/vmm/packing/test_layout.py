"""Sizes, numbers of layouts, headers."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sleepbackends.errors import RequestError
from sleepbackends.vmm.packing.layout import Header, Layout
from tests.packing import contents, reference_pack

LAYOUTS = st.builds(Layout, st.sampled_from([2, 4]), st.integers(1, 7), st.integers(0, 255))


@given(LAYOUTS)
def test_a_layout_is_a_number(layout: Layout) -> None:
    assert Layout.of(layout.code) == layout
    assert 0 < layout.code < 2**32


@pytest.mark.parametrize("wrong", [(1, 3, 0), (3, 3, 0), (2, 0, 0), (2, 8, 0), (4, 3, 256)])
def test_others_are_none(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(RequestError, match="there is no Layout"):
        Layout(*wrong)


@pytest.mark.parametrize("code", [0, 2, 0x00030201 + 1, 0x00030301])
def test_other_numbers_are_none(code: int) -> None:
    with pytest.raises(RequestError):
        Layout.of(code)


@pytest.mark.parametrize("size_bytes", [0, 1, 3, 4, 255, 256, 257, 8191, 8192, 16384, 24577, 99999])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_sizes_are_those_of_the_format(size_bytes: int, element_bytes: int) -> None:
    for planes in (1, 3, 7):
        packed = reference_pack(contents("constant", size_bytes, 2), element_bytes, planes, 7)
        header = Header.read(packed)
        assert header is not None
        layout = Layout(element_bytes, planes, 7)
        assert layout.packed_bytes(size_bytes, header.escapes) == len(packed)
        assert len(packed) % 16 == 0


GOOD = reference_pack(b"12345678", 2, 3, 9)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        GOOD[:31],
        b"SBPX" + GOOD[4:],
        GOOD[:4] + b"\2" + GOOD[5:],
        GOOD[:6] + b"\x08" + GOOD[7:],
        GOOD[:8] + struct.pack("<Q", 2**32 + 1) + GOOD[16:],
    ],
)
def test_what_is_no_header(packed: bytes) -> None:
    assert Header.read(GOOD) == (Layout(2, 3, 9), 8, 4, True)
    assert Header.read(packed) is None


def test_one_that_overflowed() -> None:
    header = Header.read(memoryview(b"SBPO" + GOOD[4:]))
    assert header == (Layout(2, 3, 9), 8, 4, False)
