from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.errors import HostMemoryError, MechanismError
from sleepbackends.hostmemory import driver
from sleepbackends.hostmemory.rollup import rollup_bytes

from .conftest import resident_bytes

PAGE = mmap.PAGESIZE
MIB = 1 << 20


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


@pytest.mark.parametrize("size_bytes", [PAGE, 3 * PAGE, 2 * MIB, 5 * MIB + PAGE])
def test_memory_goes_and_comes_back_zeroed_at_the_same_address(size_bytes: int) -> None:
    address = driver.reserve(size_bytes)
    assert resident_bytes(address, size_bytes) == 0
    for _ in range(3):
        driver.map_memory(address, size_bytes)
        driver.populate(address, size_bytes)
        assert resident_bytes(address, size_bytes) == size_bytes
        assert bytes(driver.view(address, size_bytes)) == bytes(size_bytes)
        driver.fill(address, size_bytes, 0xA5)
        assert bytes(driver.view(address, size_bytes)) == b"\xa5" * size_bytes
        driver.unmap_memory(address, size_bytes)
        assert resident_bytes(address, size_bytes) == 0
    driver.release(address, size_bytes)


def test_the_resident_set_of_the_process_falls() -> None:
    size_bytes = 64 * MIB
    address = driver.reserve(size_bytes)
    driver.map_memory(address, size_bytes)
    driver.populate(address, size_bytes)
    before = rollup_bytes("Rss")
    driver.unmap_memory(address, size_bytes)
    assert before - rollup_bytes("Rss") > size_bytes * 0.9
    driver.release(address, size_bytes)


def test_large_ranges_start_at_a_huge_page_and_nothing_sticks_out() -> None:
    size_bytes = 6 * MIB + PAGE
    before = address_space_bytes()
    address = driver.reserve(size_bytes)
    assert address_space_bytes() - before == size_bytes
    assert address % driver.HUGE_PAGE_BYTES == 0
    driver.release(address, size_bytes)
    assert address_space_bytes() == before


def test_the_range_stays_taken_while_it_has_no_memory() -> None:
    address = driver.reserve(16 * MIB)
    others = [driver.reserve(16 * MIB) for _ in range(8)]
    assert all(abs(other - address) >= 16 * MIB for other in others)
    for each in (address, *others):
        driver.release(each, 16 * MIB)


@pytest.mark.parametrize("size_bytes", [PAGE, 4 * MIB])
def test_access_without_memory_faults(size_bytes: int) -> None:
    code = f"""
import ctypes
from sleepbackends.hostmemory import driver
address = driver.reserve({size_bytes})
driver.map_memory(address, {size_bytes})
driver.populate(address, {size_bytes})
driver.unmap_memory(address, {size_bytes})
print("asleep", flush=True)
ctypes.string_at(address, 1)
print("read", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "asleep\n"
    assert done.returncode == -signal.SIGSEGV


def test_populate_on_an_old_kernel_touches_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldKernel:
        def __init__(self, libc: Any) -> None:
            self.mmap, self.munmap, self.mprotect = libc.mmap, libc.munmap, libc.mprotect

        def madvise(self, address: int, size_bytes: int, advice: int) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

    old = OldKernel(driver._libc())
    monkeypatch.setattr(driver, "_libc", lambda: old)
    address = driver.reserve(4 * MIB)
    driver.map_memory(address, 4 * MIB)
    assert resident_bytes(address, 4 * MIB) == 0
    driver.populate(address, 4 * MIB)
    assert resident_bytes(address, 4 * MIB) == 4 * MIB
    driver.release(address, 4 * MIB)


def test_no_room_is_a_host_memory_error_with_the_size() -> None:
    with pytest.raises(HostMemoryError, match="mmap") as caught:
        driver.reserve(1 << 60)
    assert caught.value.needed_bytes >= 1 << 60
    assert "ulimit" in caught.value.hint


def test_any_other_failure_is_a_mechanism_error() -> None:
    with pytest.raises(MechanismError, match="munmap"):
        driver.release(PAGE // 2, PAGE)


def test_a_hole_gives_storage_back_and_reads_as_zeros() -> None:
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        fd = file.fileno()
        os.pwrite(fd, b"x" * 2 * MIB, 0)
        os.fsync(fd)
        before = os.fstat(fd)
        assert driver.punch_hole(fd, MIB, MIB)
        after = os.fstat(fd)
        assert (before.st_blocks - after.st_blocks) * 512 == MIB
        assert after.st_size == before.st_size
        assert os.pread(fd, 2, MIB - 1) == b"x\0"


def test_a_hole_in_what_is_not_a_file_is_refused_quietly() -> None:
    reading, writing = os.pipe()
    assert not driver.punch_hole(writing, 0, PAGE)
    os.close(reading)
    os.close(writing)


def test_copy_into_copies_every_byte() -> None:
    source = (ctypes.c_ubyte * 1000)(*[i % 251 for i in range(1000)])
    target = bytearray(1000)
    driver.copy_into(memoryview(target), ctypes.addressof(source))
    assert target == bytes(source)
