"""What the demo sees of its own process."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from sleepbackends.demo.observe import process_memory

MIB = 1 << 20


@pytest.fixture
def many_mappings() -> Iterator[None]:
    """Neighbours differ in what they allow, so that the kernel does not make them one."""
    kinds = [mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE]
    kept = [mmap.mmap(-1, mmap.PAGESIZE, prot=kinds[number % 2]) for number in range(20_000)]
    yield
    for each in kept:
        each.close()


@pytest.mark.usefixtures("many_mappings")
def test_looking_takes_no_memory_however_many_mappings_there_are() -> None:
    before = process_memory()
    assert abs(process_memory() - before) < MIB


def test_memory_that_is_touched_is_seen() -> None:
    before = process_memory()
    with mmap.mmap(-1, 64 * MIB) as memory:
        memory[:] = bytes([1]) * len(memory)
        assert 64 * MIB <= process_memory() - before < 72 * MIB


def test_without_the_kernel_s_sum_the_mappings_are_added_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = process_memory()

    def refuse(path: Path, **how: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert process_memory() == pytest.approx(expected, rel=0.1)
