"""First touch of host memory, beside threads that register what was touched before."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from pathlib import Path
from typing import Any

from sleepbackends.errors import BackendUnavailableError
from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm.address_space import library_path

STEP_BYTES = 4 << 20
"""Without the native library: how much is touched by one call, while which nobody can register
or map memory."""


def touch(address: int, size_bytes: int) -> None:
    """Put memory behind a mapped range that nobody has touched yet, letting other threads run.

    Whether there is so much is to be checked before: memory that is not there ends the process,
    as any other that is written to.

    Raises
    ------
    HostMemoryError
        If there is not enough, and the kernel says so.
    """
    try:
        library = _library(library_path("host"))
    except BackendUnavailableError:
        for at in range(0, size_bytes, STEP_BYTES):
            host.populate(address + at, min(STEP_BYTES, size_bytes - at))
    else:
        library.sb_touch(address, size_bytes, mmap.PAGESIZE)


@cache
def _library(path: Path) -> Any:
    library = ctypes.CDLL(str(path))
    library.sb_touch.restype = None
    library.sb_touch.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    return library
