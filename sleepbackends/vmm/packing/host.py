"""Packing and unpacking by the processor, in host memory.

Every call lets other threads run, and so do several calls at once.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from sleepbackends.errors import ContentsLostError, RequestError
from sleepbackends.vmm.address_space import library_path
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.packing.layout import Choice, Layout


def survey(span: Span) -> Choice | None:
    """Look at a sample of host memory for the best way to pack it; None if none saves 10 %.

    Raises
    ------
    BackendUnavailableError
        If the package was installed without its native libraries.
    """
    escapes = ctypes.c_uint64()
    code = _host().sb_pack_survey(span.address, span.size_bytes, ctypes.byref(escapes))
    return Choice(Layout.of(code), escapes.value) if code else None


def count(span: Span, layout: Layout) -> int:
    """Count the escapes of host memory in a layout.

    Raises
    ------
    BackendUnavailableError
        If the package was installed without its native libraries.
    """
    return int(_host().sb_pack_count(span.address, span.size_bytes, layout.code))


def pack(span: Span, layout: Layout, target: int, capacity_bytes: int) -> int:
    """Pack host memory.

    Parameters
    ----------
    span : Span
        What to pack; at any address.
    layout : Layout
        How.
    target : int
        Where to; any address.
    capacity_bytes : int
        How much room there is.

    Returns
    -------
    int
        How many bytes it takes. If that is more than there is room for, what was written is of no
        use, and its header says so.

    Raises
    ------
    RequestError
        If there is not even room for everything but escapes; nothing was written.
    BackendUnavailableError
        If the package was installed without its native libraries.
    """
    size_bytes = int(_host().sb_pack(*span, layout.code, target, capacity_bytes))
    if not size_bytes:
        raise RequestError(
            f"{span.size_bytes} bytes cannot be packed into {capacity_bytes}",
            hint=f"have room for {layout.packed_bytes(span.size_bytes, 0)} and each escape",
        )
    return size_bytes


def unpack(packed: Span, target: int, size_bytes: int, offset: int = 0) -> None:
    """Unpack host memory, or a part of it.

    Parameters
    ----------
    packed : Span
        The packed bytes; at any address. What is behind them does not matter.
    target : int
        Where to; any address.
    size_bytes : int
        How many bytes of what was packed are wanted.
    offset : int
        From which on.

    Raises
    ------
    ContentsLostError
        If these are no packed bytes that have the wanted ones in them; nothing was written.
    BackendUnavailableError
        If the package was installed without its native libraries.
    """
    if not _host().sb_unpack(*packed, offset, target, size_bytes):
        raise ContentsLostError(
            f"the packed bytes at {packed.address:#x} are damaged, or not the right ones",
            hint="reload what was saved there",
        )


def _host() -> Any:
    return _library(library_path("host"))


@cache
def _library(path: Path) -> Any:
    library = ctypes.CDLL(str(path))
    address, size, layout = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
    library.sb_pack_survey.restype = layout
    library.sb_pack_survey.argtypes = (address, size, ctypes.POINTER(ctypes.c_uint64))
    library.sb_pack_count.restype = size
    library.sb_pack_count.argtypes = (address, size, layout)
    library.sb_pack.restype = size
    library.sb_pack.argtypes = (address, size, layout, address, size)
    library.sb_unpack.restype = ctypes.c_int
    library.sb_unpack.argtypes = (address, size, size, address, size)
    return library
