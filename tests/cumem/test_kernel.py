"""The source of the fingerprint kernel, run on the host thread by thread as a device would."""

from __future__ import annotations

import ctypes
import mmap
import random
import shutil
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm.fingerprint import Span, finish
from tests.fingerprints import reference
from tests.native.build import compile_kernels

TILE_BYTES = 16 << 10
"""What a block reads at a time."""

DATA = random.Random(2).randbytes(5 * TILE_BYTES + 64)  # noqa: S311 - test data

Run = Callable[[Sequence[Span], int], list[int]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Compute fingerprints with so many blocks for each span."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    output = tmp_path_factory.mktemp("kernel") / "kernel.so"
    library = ctypes.CDLL(str(compile_kernels(output, "fingerprint")))

    def run(spans: Sequence[Span], blocks: int) -> list[int]:
        table = (ctypes.c_uint64 * (2 * len(spans)))(*(word for span in spans for word in span))
        # One more pair than there are spans: nobody may write to it.
        sums = (ctypes.c_uint64 * (2 * len(spans) + 2))()
        library.run_fingerprint(table, len(spans), blocks, len(spans) * blocks, sums)
        assert list(sums[-2:]) == [0, 0]
        pairs = zip(sums[:-2:2], sums[1:-2:2], spans, strict=True)
        return [finish(s1, s2, span.size_bytes) for s1, s2, span in pairs]

    return run


@pytest.fixture(scope="module")
def base() -> Iterator[int]:
    """The address of the data, a multiple of 64."""
    buffer = ctypes.create_string_buffer(len(DATA) + 64)
    at = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % 64
    ctypes.memmove(at, DATA, len(DATA))
    yield at
    assert ctypes.string_at(at, len(DATA)) == DATA, "it wrote to what it hashes"


def check(run: Run, base: int, cuts: Sequence[tuple[int, int]], blocks: int) -> None:
    spans = [Span(base + offset, size) for offset, size in cuts]
    assert run(spans, blocks) == [reference(DATA[at : at + size]) for at, size in cuts]


@pytest.mark.parametrize("offset", [0, 16, 8, 1])
def test_sizes_around_words_pairs_and_tiles(run: Run, base: int, offset: int) -> None:
    sizes = [
        *range(34),
        *(4095, 4096, 4097, 3 * 4096 + 15, 3 * 4096 + 17),
        *(TILE_BYTES + change for change in (-17, -16, -1, 0, 1, 16, 24)),
        3 * TILE_BYTES - 4096,
    ]
    check(run, base, [(offset, size) for size in sizes], 1)


@pytest.mark.parametrize("blocks", [2, 3, 7])
def test_blocks_share_a_span(run: Run, base: int, blocks: int) -> None:
    sizes = [0, 1, 40, TILE_BYTES, 2 * TILE_BYTES + 8, 5 * TILE_BYTES, 5 * TILE_BYTES - 5000]
    check(run, base, [(0, size) for size in sizes] + [(3, 2 * TILE_BYTES)], blocks)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 63), st.integers(0, 5 * TILE_BYTES)), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_any_spans(run: Run, base: int, cuts: list[tuple[int, int]], blocks: int) -> None:
    check(run, base, cuts, blocks)


@pytest.mark.parametrize("size_bytes", [1, 15, 16, 17, 31, 4096])
def test_nothing_behind_the_end_is_read(run: Run, size_bytes: int) -> None:
    start = host.reserve(2 * mmap.PAGESIZE)
    host.map_memory(start, mmap.PAGESIZE)
    try:
        span = Span(start + mmap.PAGESIZE - size_bytes, size_bytes)
        assert run([span], 2) == [reference(bytes(size_bytes))]
    finally:
        host.release(start, 2 * mmap.PAGESIZE)
