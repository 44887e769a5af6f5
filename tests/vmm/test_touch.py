"""First touch: every page is there afterwards, with zeros, with the native library and without."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm import address_space
from sleepbackends.vmm.touch import touch
from tests.native.build import HOST_LIBRARY, compile_host

PAGE = mmap.PAGESIZE
PAGES = 300


@pytest.fixture(params=[True, False], ids=["native", "without"])
def library(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> bool:
    if request.param:
        compile_host(tmp_path / HOST_LIBRARY)
    monkeypatch.setattr(address_space, "_FOLDER", tmp_path)
    return bool(request.param)


@pytest.fixture
def memory() -> Iterator[int]:
    address = host.reserve(PAGES * PAGE)
    host.map_memory(address, PAGES * PAGE)
    yield address
    host.release(address, PAGES * PAGE)


def resident(address: int, pages: int) -> list[bool]:
    """Which of the pages have memory behind them, as the kernel says."""
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(address // PAGE * 8)
        entries = memoryview(file.read(pages * 8)).cast("Q")
    return [bool(entry >> 63) for entry in entries]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("pages", [1, 5, PAGES])
def test_every_page_is_there_and_no_other(memory: int, pages: int) -> None:
    assert not any(resident(memory, PAGES))
    touch(memory, pages * PAGE)
    assert resident(memory, PAGES) == [number < pages for number in range(PAGES)]
    assert ctypes.string_at(memory, pages * PAGE) == bytes(pages * PAGE)
