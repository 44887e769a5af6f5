"""The system calls behind host memory; the only module of these backends that calls libc.

Every call lets other Python threads run meanwhile. Sizes are whole pages (``round_up``).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import cache
from typing import Any

from sleepbackends.errors import HostMemoryError, MechanismError

__all__ = [
    "HUGE_PAGE_BYTES",
    "buffer",
    "copy_into",
    "equal",
    "fill",
    "map_memory",
    "populate",
    "punch_hole",
    "release",
    "reserve",
    "round_up",
    "unmap_memory",
    "view",
]

HUGE_PAGE_BYTES = 2 << 20
"""The common size of a huge page. Where the kernel's are larger, the advice has no effect."""

# Not in Python's mmap module; the values of Linux on x86, Arm, POWER and RISC-V.
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23
_FALLOC_FL_KEEP_SIZE = 0x1
_FALLOC_FL_PUNCH_HOLE = 0x2

_MAP_FAILED = ctypes.c_void_p(-1).value


def round_up(size_bytes: int, unit_bytes: int = mmap.PAGESIZE) -> int:
    """Return the smallest multiple of a unit, by default a page, that holds so many bytes."""
    return -(-size_bytes // unit_bytes) * unit_bytes


def reserve(size_bytes: int) -> int:
    """Take an address range with no memory behind it and return where it starts.

    A range of a huge page or more starts at a multiple of a huge page.

    Raises
    ------
    HostMemoryError
        If the kernel has no room for the range.
    """
    if size_bytes < HUGE_PAGE_BYTES:
        return _mmap_nothing(None, size_bytes)
    # The kernel aligns to pages only: take more, and give back what sticks out.
    wide_bytes = size_bytes + HUGE_PAGE_BYTES
    start = _mmap_nothing(None, wide_bytes)
    address = round_up(start, HUGE_PAGE_BYTES)
    if address > start:
        release(start, address - start)
    release(address + size_bytes, start + wide_bytes - address - size_bytes)
    return address


def map_memory(address: int, size_bytes: int) -> None:
    """Allow memory behind a reserved range; it comes, zeroed, at ``populate`` or first touch.

    Raises
    ------
    HostMemoryError
        If the kernel refuses to commit so much; the range stays without memory.
    MechanismError
        If the call failed otherwise; the range stays without memory.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    _check("mprotect", size_bytes, _libc().mprotect(address, size_bytes, protection) == 0)
    if size_bytes >= HUGE_PAGE_BYTES:
        # Advice only: a kernel without huge pages refuses it, and nothing is lost.
        _libc().madvise(address, size_bytes, mmap.MADV_HUGEPAGE)


def populate(address: int, size_bytes: int) -> None:
    """Put memory behind a mapped range that was not touched yet.

    Raises
    ------
    HostMemoryError
        If there is not enough; the range is partly populated.
    """
    if _libc().madvise(address, size_bytes, _MADV_POPULATE_WRITE) == 0:
        return
    if ctypes.get_errno() == errno.EINVAL:
        # Linux before 5.14. Untouched pages hold zeros, so writing zeros changes nothing.
        fill(address, size_bytes, 0)
        return
    _check("madvise(MADV_POPULATE_WRITE)", size_bytes, False)


def map_file(address: int, size_bytes: int, fd: int) -> None:
    """Map the beginning of a file over a reserved range, shared with whoever else maps it.

    A lock on the open file lasts as long as the mapping, whether the file is closed or not.

    Raises
    ------
    HostMemoryError
        If the kernel has no room for the mapping; the range stays without memory.
    MechanismError
        If the call failed otherwise; the range stays without memory.
    """
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    got = _libc().mmap(address, size_bytes, protection, flags, fd, 0)
    _check("mmap", size_bytes, got != _MAP_FAILED)
    if size_bytes >= HUGE_PAGE_BYTES:
        # Advice only, as above.
        _libc().madvise(address, size_bytes, mmap.MADV_HUGEPAGE)


def forbid_writing(address: int, size_bytes: int) -> None:
    """Let the CPU only read a mapped range; a write faults from now on.

    Raises
    ------
    HostMemoryError, MechanismError
        If the call failed; the range can still be written.
    """
    _check("mprotect", size_bytes, _libc().mprotect(address, size_bytes, mmap.PROT_READ) == 0)


def unmap_memory(address: int, size_bytes: int) -> None:
    """Give the memory back and keep the range; an access faults from now on.

    Raises
    ------
    HostMemoryError, MechanismError
        If the call failed; memory and contents are still there.
    """
    # Mapping nothing over the range frees the pages at once and in one step, which
    # changing the protection and advising afterwards would not.
    _mmap_nothing(address, size_bytes)


def release(address: int, size_bytes: int) -> None:
    """Give a range back for good, mapped or not.

    Raises
    ------
    MechanismError
        If it is not a range of this process.
    """
    if size_bytes:
        _check("munmap", size_bytes, _libc().munmap(address, size_bytes) == 0)


def fill(address: int, size_bytes: int, byte: int) -> None:
    """Set every byte of a mapped range."""
    ctypes.memset(address, byte, size_bytes)


def copy_into(target: memoryview, from_address: int) -> None:
    """Fill a writable view with the bytes at an address."""
    start = ctypes.addressof(ctypes.c_ubyte.from_buffer(target))
    ctypes.memmove(start, from_address, len(target))


def buffer(address: int, size_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Return a writable buffer over mapped bytes; it does not keep them mapped."""
    return (ctypes.c_ubyte * size_bytes).from_address(address)


def view(address: int, size_bytes: int) -> memoryview:
    """Return a writable view of mapped bytes; it does not keep them mapped."""
    return memoryview(buffer(address, size_bytes)).cast("B")


def equal(address: int, other: int, size_bytes: int) -> bool:
    """Tell whether two mapped ranges hold the same bytes."""
    return bool(_libc().memcmp(address, other, size_bytes) == 0)


def punch_hole(fd: int, offset: int, size_bytes: int) -> bool:
    """Give back the storage of a part of a file, and tell whether that worked.

    Not every file system can; the part then keeps its storage until the file is truncated.
    """
    try:
        fallocate = _libc().fallocate
    except AttributeError:
        return False
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    return bool(fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(size_bytes)) == 0)


def preallocate(fd: int, size_bytes: int) -> None:
    """Make a file so long, with storage behind all of it where the file system can do that.

    Raises
    ------
    OSError
        If there is not enough storage, or the file cannot be made so long.
    """
    # Not ``posix_fallocate``, which writes to every block where the file system cannot.
    if _libc().fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(size_bytes)) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(number, os.strerror(number))
    os.ftruncate(fd, size_bytes)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return libc


def _mmap_nothing(address: int | None, size_bytes: int) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if address is not None:
        flags |= _MAP_FIXED
    # No protection bits: the range counts neither as memory in use nor as committed.
    got = _libc().mmap(address, size_bytes, 0, flags, -1, 0)
    _check("mmap", size_bytes, got != _MAP_FAILED)
    return int(got)


def _check(call: str, size_bytes: int, succeeded: bool) -> None:
    """Turn ``errno`` into an error of this package; the only place that does."""
    if succeeded:
        return
    number = ctypes.get_errno()
    message = f"{call} of {size_bytes} bytes failed: {os.strerror(number)}"
    if number == errno.ENOMEM:
        raise HostMemoryError(
            message,
            needed_bytes=size_bytes,
            hint="free memory, or raise the limit in force: ulimit -v, ulimit -d, "
            "vm.overcommit_memory, vm.max_map_count",
        )
    raise MechanismError(message)
