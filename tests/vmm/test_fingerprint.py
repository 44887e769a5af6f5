"""The fingerprint of host memory: the function that is written down, and what it notices."""

from __future__ import annotations

import ctypes
import mmap
import random
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sleepbackends.errors import BackendUnavailableError
from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm import address_space
from sleepbackends.vmm.fingerprint import WORD_MASK, finish, host_fingerprint
from tests.fingerprints import reference
from tests.native.build import HOST_LIBRARY, compile_host
from tests.simulators.cuda import find_compiler

CHUNK_BYTES = 4096


@pytest.fixture(scope="module", autouse=True, params=["", "-DFINGERPRINT_PLAIN"])
def _library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Every test with the loop that this processor takes, and with the one of all others."""
    if find_compiler() is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("host")
    compile_host(folder / HOST_LIBRARY, *filter(None, [request.param]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(address_space, "_FOLDER", folder)
        yield


def fingerprint(data: bytes, offset: int = 0) -> int:
    """Of bytes that lie so far behind a multiple of 64, with other bytes around them."""
    buffer = ctypes.create_string_buffer(b"\xa5" * (len(data) + 128 + offset))
    start = ctypes.addressof(buffer) + 64 - ctypes.addressof(buffer) % 64 + offset
    ctypes.memmove(start, data, len(data))
    return host_fingerprint(start, len(data))


SOURCE = random.Random(1)  # noqa: S311 - test data


@pytest.mark.parametrize("size_bytes", [*range(41), 255, 4095, 4096, 4097, 100_003, 3 << 20])
def test_it_is_the_function_at_every_size(size_bytes: int) -> None:
    data = SOURCE.randbytes(size_bytes)
    assert fingerprint(data) == reference(data)


@pytest.mark.parametrize("offset", range(1, 17))
def test_it_is_the_function_at_every_address(offset: int) -> None:
    data = SOURCE.randbytes(1001)
    assert fingerprint(data, offset) == reference(data)


@given(st.binary(max_size=600), st.integers(0, 9))
def test_it_is_the_function(data: bytes, offset: int) -> None:
    assert fingerprint(data, offset) == reference(data)


@given(st.lists(st.sampled_from([0, 1, 1 << 31, 1 << 32, 1 << 63, WORD_MASK]), max_size=40))
def test_it_is_the_function_of_extreme_words(words: list[int]) -> None:
    data = struct.pack(f"<{len(words)}Q", *words)
    assert fingerprint(data) == reference(data)


def test_nothing_is_nothing() -> None:
    assert host_fingerprint(0, 0) == finish(0, 0, 0) == 0


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_change_within_one_word_always_shows_in_the_low_half(
    before: bytes, data: st.DataObject
) -> None:
    word = data.draw(st.integers(0, (len(before) - 1) // 8)) * 8
    size = len(before[word : word + 8])
    after = bytearray(before)
    after[word : word + 8] = data.draw(
        st.binary(min_size=size, max_size=size).filter(lambda new: new != before[word : word + 8])
    )
    assert fingerprint(before) & WORD_MASK != fingerprint(bytes(after)) & WORD_MASK


@given(st.binary(min_size=1, max_size=9000), st.data())
def test_every_single_bit_is_seen(before: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(before) - 1))
    after = bytearray(before)
    after[bit // 8] ^= 1 << bit % 8
    assert fingerprint(before) != fingerprint(bytes(after))


_BIG = SOURCE.randbytes(4 * CHUNK_BYTES)


@given(st.integers(0, len(_BIG) // 8 - 1), st.integers(0, len(_BIG) // 8 - 1))
def test_swapped_words_are_seen(first: int, second: int) -> None:
    words = list(struct.unpack(f"<{len(_BIG) // 8}Q", _BIG))
    words[first], words[second] = words[second], words[first]
    after = struct.pack(f"<{len(words)}Q", *words)
    assert (fingerprint(_BIG) == fingerprint(after)) == (first == second)


@given(st.permutations(range(4)))
def test_swapped_chunks_are_seen(order: list[int]) -> None:
    chunks = [_BIG[at : at + CHUNK_BYTES] for at in range(0, len(_BIG), CHUNK_BYTES)]
    after = b"".join(chunks[number] for number in order)
    assert (fingerprint(_BIG) == fingerprint(after)) == (order == sorted(order))


_PAIRS = {
    "negative zero": (struct.pack("<4d", 0, 1, 0, 2), struct.pack("<4d", 0, 1, -0.0, 2)),
    "signs of two": (struct.pack("<4d", 1, 2, 3, 4), struct.pack("<4d", -1, 2, -3, 4)),
    "payload of a NaN": (struct.pack("<Q", 0x7FF8 << 48), struct.pack("<Q", (0x7FF8 << 48) + 1)),
    "quiet and signalling": (struct.pack("<I", 0x7FC00000), struct.pack("<I", 0x7FA00000)),
    "zeros and nothing": (bytes(64), b""),
    "zeros and fewer": (bytes(64), bytes(63)),
    "zeros within a word": (bytes(3), bytes(2)),
    "moved by a byte": (b"abc" + bytes(30), bytes(1) + b"abc" + bytes(29)),
    "moved by a word": (b"abcdefgh" + bytes(24), bytes(8) + b"abcdefgh" + bytes(16)),
    "last byte": (bytes(40), bytes(39) + b"\1"),
}


@pytest.mark.parametrize("pair", _PAIRS.values(), ids=_PAIRS)
def test_what_looks_alike_is_told_apart(pair: tuple[bytes, bytes]) -> None:
    assert pair[0] != pair[1]
    assert fingerprint(pair[0]) != fingerprint(pair[1])


@settings(max_examples=30)
@given(st.integers(0, 2**63), st.sampled_from([1 << 15, 1 << 31, 1 << 47, 1 << 63]))
def test_signs_that_flip_in_pairs_are_seen(seed: int, sign: int) -> None:
    """The changes that ``s1`` misses half of the time."""
    source = random.Random(seed)  # noqa: S311 - test data
    words = [source.getrandbits(64) for _ in range(64)]
    before = fingerprint(struct.pack("<64Q", *words))
    for _ in range(50):
        first, second = source.sample(range(64), 2)
        changed = list(words)
        changed[first] ^= sign
        changed[second] ^= sign
        assert fingerprint(struct.pack("<64Q", *changed)) != before


@pytest.mark.parametrize("size_bytes", [1, 7, 8, 9, 63, 64, 65, 4096])
def test_nothing_behind_the_end_is_read(size_bytes: int) -> None:
    """The page behind is not there: reading it would end this process."""
    start = host.reserve(2 * mmap.PAGESIZE)
    host.map_memory(start, mmap.PAGESIZE)
    host.fill(start, mmap.PAGESIZE, 3)
    try:
        at = start + mmap.PAGESIZE - size_bytes
        assert host_fingerprint(at, size_bytes) == reference(b"\3" * size_bytes)
    finally:
        host.release(start, 2 * mmap.PAGESIZE)


def test_other_threads_run_meanwhile() -> None:
    size_bytes = 64 << 20
    memory = mmap.mmap(-1, size_bytes)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    thread = threading.Thread(target=host_fingerprint, args=(start, size_bytes))
    turns = 0
    thread.start()
    while thread.is_alive():
        turns += 1
    assert turns > 1000, "this thread had to wait"


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "_FOLDER", tmp_path)
    with pytest.raises(BackendUnavailableError, match="libsleepbackends_host"):
        host_fingerprint(0, 0)
