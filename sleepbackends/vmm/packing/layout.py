"""How bytes are packed: in what layout, and how many bytes that takes.

Weights are numbers around zero, and of their exponents only a few occur often. So an element of
2 or 4 bytes is rotated left by one bit, which makes the exponent of bf16 or fp32 its top byte
(of fp16: the exponent and 3 bits more), and the top byte is coded in a few bits:

- Codes 0 to ``2**planes - 2`` stand for as many consecutive top bytes, from ``base`` on, 0 after
  255. The last code is an escape: the top byte is stored as it is, in a list of its own.
- Codes are stored as bit planes: bit ``i % 8`` of byte ``i // 8`` of plane ``p`` is bit ``p`` of
  the code of element ``i``.
- All other bytes are stored as they are: first the lowest byte of every element, then the next.
- Escapes have no positions. They are in the order of their elements, and a table says how many
  there are before each 4096 elements, so that those find theirs without all others.
- A header of 32 bytes says what is needed to unpack: layout, size, number of escapes.
  Every part begins at a multiple of 16 bytes, and what is between parts are zeros.

Normally distributed bf16 takes about 11.2 bits an element. The same bytes in the same layout are
always packed to the same bytes. What is packed may be of any type and size, or of several: what
does not shrink by 10 % in any layout is not to be packed.

The C header ``_native/packing.h`` is what the host library and the CUDA kernels are built from;
sizes are computed here by the same rules.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from sleepbackends.errors import RequestError

HEADER_BYTES = 32
MOST_BYTES = 1 << 32
"""What can be packed as one."""

_MAGIC = 0x4B504253
_OVERFLOWED = 0x4F504253
_VERSION = 1
_HEADER = struct.Struct("<IIQI")
TILE_ELEMENTS = 4096


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to pack.

    Parameters
    ----------
    element_bytes : int
        Of an element: 2 or 4.
    planes : int
        In how many bits its top byte is coded: 1 to 7.
    base : int
        The top byte of code 0.

    Raises
    ------
    RequestError
        If there is no such layout.
    """

    element_bytes: int
    planes: int
    base: int

    def __post_init__(self) -> None:
        good = self.element_bytes in (2, 4) and 1 <= self.planes <= 7 and 0 <= self.base <= 255
        if not good:
            raise RequestError(f"there is no {self!r}", hint="take one that a survey returned")

    @property
    def code(self) -> int:
        """The layout as one number of 32 bits, never 0, as headers and kernels have it."""
        return _VERSION | self.element_bytes << 8 | self.planes << 16 | self.base << 24

    @classmethod
    def of(cls, code: int) -> Layout:
        """Return the layout that a number stands for.

        Raises
        ------
        RequestError
            If there is none.
        """
        if code & 255 != _VERSION:
            raise RequestError(f"no layout is {code:#x}", hint="take one that a survey returned")
        return cls(code >> 8 & 255, code >> 16 & 255, code >> 24)

    def packed_bytes(self, size_bytes: int, escapes: int) -> int:
        """Return how many bytes are packed to, exactly; a multiple of 16.

        Parameters
        ----------
        size_bytes : int
            What is packed.
        escapes : int
            How many of its elements have a top byte without a code.
        """
        elements = size_bytes // self.element_bytes
        octets = _round_up(elements, 128) // 8
        entries = _round_up(-(-elements // TILE_ELEMENTS) + 1, 4)
        fixed = HEADER_BYTES + 4 * entries + (self.planes + 8 * (self.element_bytes - 1)) * octets
        return _round_up(fixed + escapes, 16)


class Choice(NamedTuple):
    """What a survey found to be best.

    Parameters
    ----------
    layout : Layout
        How to pack.
    escapes : int
        How many escapes to expect, from a sample: as likely too few as too many.
    """

    layout: Layout
    escapes: int

    def packed_bytes(self, size_bytes: int) -> int:
        """Return how many bytes to expect when so many are packed."""
        return self.layout.packed_bytes(size_bytes, self.escapes)


class Header(NamedTuple):
    """What packed bytes say of themselves.

    Parameters
    ----------
    layout : Layout
        How they were packed.
    size_bytes : int
        Of what was packed.
    escapes : int
        How many there are.
    is_whole : bool
        Whether there was room for all; else there is nothing to unpack.
    """

    layout: Layout
    size_bytes: int
    escapes: int
    is_whole: bool

    @property
    def packed_bytes(self) -> int:
        """How many bytes it takes, also if there was no room for them."""
        return self.layout.packed_bytes(self.size_bytes, self.escapes)

    @classmethod
    def read(cls, packed: bytes | memoryview) -> Header | None:
        """Return what the first bytes say; None if those are not packed bytes."""
        if len(packed) < HEADER_BYTES:
            return None
        magic, code, size_bytes, escapes = _HEADER.unpack_from(packed)
        try:
            layout = Layout.of(code)
        except RequestError:
            return None
        if magic not in (_MAGIC, _OVERFLOWED) or size_bytes > MOST_BYTES:
            return None
        return cls(layout, size_bytes, escapes, magic == _MAGIC)
