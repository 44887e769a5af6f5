"""Packing as it is written down, in NumPy: shares nothing with what is tested.

And contents that try it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

TILE = 4096
MAGIC = b"SBPK"


def _padded(data: bytes, unit: int) -> bytes:
    return data + bytes(-len(data) % unit)


def _turned(data: bytes, element_bytes: int) -> Bytes:
    """Bytes of each whole element after rotating it, the lowest first; one row an element."""
    kind, bits = f"<u{element_bytes}", 8 * element_bytes
    elements = np.frombuffer(data, kind, len(data) // element_bytes).astype("<u8")
    turned: Bytes = (elements << np.uint64(1) | elements >> np.uint64(bits - 1)).view(np.uint8)
    return turned.reshape(-1, 8)[:, :element_bytes]


def reference_escapes(data: bytes, element_bytes: int, planes: int, base: int) -> int:
    offsets = (_turned(data, element_bytes)[:, -1].astype(int) - base) % 256
    return int((offsets >= 2**planes - 1).sum())


def reference_pack(data: bytes, element_bytes: int, planes: int, base: int) -> bytes:
    turned = _turned(data, element_bytes)
    count = len(turned)
    tops, escape = turned[:, -1], 2**planes - 1
    codes = np.minimum((tops.astype(int) - base) % 256, escape)
    escaped = codes == escape
    tiles = -(-count // TILE)
    table = [int(escaped[: TILE * tile].sum()) for tile in range(tiles)]
    total = int(escaped.sum())
    table += [total] * (-(-(tiles + 1) // 4) * 4 - tiles)

    room = -(-count // 128) * 128
    padded = np.zeros(room, int)
    padded[:count] = codes
    rest = np.zeros((element_bytes - 1, room), np.uint8)
    rest[:, :count] = turned[:, :-1].T
    bits = [np.packbits(padded >> plane & 1, bitorder="little") for plane in range(planes)]

    tail = data[count * element_bytes :]
    header = MAGIC + bytes([1, element_bytes, planes, base])
    header += struct.pack("<QI", len(data), total) + _padded(tail, 4).ljust(4, b"\0") + bytes(8)
    parts = [header, struct.pack(f"<{len(table)}I", *table), *(each.tobytes() for each in bits)]
    return b"".join([*parts, rest.tobytes(), _padded(tops[escaped].tobytes(), 16)])


def reference_unpack(packed: bytes) -> bytes:
    assert packed[:4] == MAGIC
    version, element_bytes, planes, base = packed[4:8]
    assert version == 1
    size, total = struct.unpack_from("<QI", packed, 8)
    count = size // element_bytes
    entries, room = -(-(-(-count // TILE) + 1) // 4) * 4, -(-count // 128) * 128
    at = 32 + 4 * entries
    codes = np.zeros(room, int)
    for plane in range(planes):
        bits = np.frombuffer(packed, np.uint8, room // 8, at)
        codes |= np.unpackbits(bits, bitorder="little").astype(int) << plane
        at += room // 8
    turned = np.zeros((count, 8), np.uint8)
    for byte in range(element_bytes - 1):
        turned[:, byte] = np.frombuffer(packed, np.uint8, count, at)
        at += room
    tops = (codes[:count] + base) % 256
    tops[codes[:count] == 2**planes - 1] = np.frombuffer(packed, np.uint8, total, at)
    turned[:, element_bytes - 1] = tops
    elements = turned.reshape(-1).view("<u8")
    back = elements >> np.uint64(1) | elements << np.uint64(8 * element_bytes - 1)
    return back.astype(f"<u{element_bytes}").tobytes() + packed[20:][: size % element_bytes]


PIECE = 8192


def _sample(data: bytes) -> list[tuple[int, int]]:
    pieces = -(-len(data) // PIECE)
    stride = max(16, -(-pieces // 256))
    found = []
    for number, first in enumerate(range(0, pieces, stride)):
        random = ((number + 1) * 0x9E3779B9 & 0xFFFFFFFF) >> 8
        at = PIECE * (first + random % min(stride, pieces - first))
        found.append((at, min(PIECE, len(data) - at) // 4 * 4))
    return found


def reference_survey(data: bytes) -> tuple[tuple[int, int, int], int] | None:
    """The layout with the fewest bits for a sample, and the escapes that it lets expect."""
    sample = b"".join(data[at : at + size] for at, size in _sample(data))
    if not sample:
        return None
    best: tuple[int, int, int, int] | None = None
    escapes_of_best = 0
    for element_bytes in (2, 4):
        tops = np.bincount(_turned(sample, element_bytes)[:, -1], minlength=256)
        elements = len(sample) // element_bytes
        for planes in range(1, 8):
            for base in range(256):
                window = (base + np.arange(2**planes - 1)) % 256
                escapes = elements - int(tops[window].sum())
                bits = elements * (8 * (element_bytes - 1) + planes) + 8 * escapes
                if best is None or (bits, element_bytes, planes, base) < best:
                    best, escapes_of_best = (bits, element_bytes, planes, base), escapes
    assert best is not None
    elements, whole = len(sample) // best[1], len(data) // best[1]
    escapes = -(-escapes_of_best * whole // elements)
    fixed = len(reference_pack(bytes(len(data)), best[1], best[2], 0))
    return (best[1:], escapes) if 10 * (fixed + -(-escapes // 16) * 16) <= 9 * len(data) else None


# ------------------------------------------------------------------------------- contents


def _bf16(numbers: npt.NDArray[np.float32]) -> Bytes:
    """Numbers cut off to bf16."""
    return (numbers.astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)


def _all_elements(source: np.random.Generator, count: int) -> Bytes:
    """Every bf16 there is: all exponents, infinities, payloads of NaN, subnormals."""
    return np.resize(source.permutation(65536), count).astype("<u2").view(np.uint8)


def _weights(source: np.random.Generator, count: int) -> Bytes:
    return _bf16(source.normal(0, 0.02, count).astype(np.float32))


def _with_nans(source: np.random.Generator, count: int) -> Bytes:
    found = _weights(source, count).view("<u2").copy()
    at = source.integers(0, 2, count).astype(bool)
    found[at] = (0x7F80 | source.integers(1, 128, at.sum()) | source.integers(0, 2) << 15).astype(
        "<u2"
    )
    return found.view(np.uint8)


def _subnormals(source: np.random.Generator, count: int) -> Bytes:
    signs = source.integers(0, 2, count) << 15
    return (signs | source.integers(0, 128, count)).astype("<u2").view(np.uint8)


def _random(source: np.random.Generator, count: int) -> Bytes:
    return source.integers(0, 256, 2 * count, np.uint8)


def _constant(source: np.random.Generator, count: int) -> Bytes:
    return np.full(2 * count, source.integers(0, 256), np.uint8)


def _alternating(source: np.random.Generator, count: int) -> Bytes:
    """Two elements in turn, mostly with exponents far apart."""
    return np.resize(source.integers(0, 65536, 2), count).astype("<u2").view(np.uint8)


def _rare(source: np.random.Generator, count: int) -> Bytes:
    """Weights with a few outliers, together or apart."""
    found = _weights(source, count).view("<u2").copy()
    at = source.integers(0, max(count, 1), max(1, count // 500))
    found[at[at < count]] = 0x7F7F
    found[count // 3 : count // 3 + 40] = 0x0001
    return found.view(np.uint8)


def _fp32(source: np.random.Generator, count: int) -> Bytes:
    return source.normal(0, 0.02, -(-count // 2)).astype("<f4").view(np.uint8)


def _fp16(source: np.random.Generator, count: int) -> Bytes:
    return source.normal(0, 0.02, count).astype("<f2").view(np.uint8)


def _int8(source: np.random.Generator, count: int) -> Bytes:
    return source.normal(0, 30, 2 * count).clip(-128, 127).astype(np.int8).view(np.uint8)


def _mixed(source: np.random.Generator, count: int) -> Bytes:
    """Small tensors of several types, one behind another, at any byte."""
    parts: list[Bytes] = []
    while sum(len(part) for part in parts) < 2 * count:
        kind = CONTENTS[list(CONTENTS)[source.integers(0, len(CONTENTS) - 1)]]
        part = kind(source, int(source.integers(1, 3000)))
        parts.append(part[: source.integers(1, len(part) + 1)])
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


CONTENTS: dict[str, Callable[[np.random.Generator, int], Bytes]] = {
    "all elements": _all_elements,
    "weights": _weights,
    "payloads of NaN": _with_nans,
    "subnormals": _subnormals,
    "random": _random,
    "constant": _constant,
    "alternating": _alternating,
    "outliers": _rare,
    "fp32": _fp32,
    "fp16": _fp16,
    "int8": _int8,
    "mixed": _mixed,
}
"""Each makes about 2 bytes for each of so many elements; the last is made of the others."""


def contents(name: str, size_bytes: int, seed: int) -> bytes:
    """So many bytes of one kind."""
    source = np.random.default_rng(seed)
    made = CONTENTS[name](source, size_bytes // 2 + 2).tobytes()
    return made[:size_bytes]
