"""Positioned reads and writes that go on until everything is done."""

from __future__ import annotations

import errno
import os

# Linux moves at most this much in one call, and macOS refuses more.
_CALL_BYTES = 0x7FFF_F000


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all bytes at a position.

    Raises
    ------
    OSError
        If the kernel refuses some of them; those before were written.
    """
    done = 0
    while done < len(data):
        written = os.pwrite(fd, data[done : done + _CALL_BYTES], offset + done)
        if written == 0:
            raise OSError(errno.EIO, "nothing was written")
        done += written


def read_into(fd: int, data: memoryview, offset: int) -> int:
    """Read from a position until the memory is full or the file ends; return the bytes read.

    Raises
    ------
    OSError
        If the kernel cannot read some of them.
    """
    done = 0
    while done < len(data):
        got = os.preadv(fd, [data[done : done + _CALL_BYTES]], offset + done)
        if got == 0:
            break
        done += got
    return done
