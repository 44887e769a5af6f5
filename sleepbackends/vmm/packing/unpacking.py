"""Packed bytes that the processor unpacks: to be looked at, or where the device has no room."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cached_property

from sleepbackends.errors import ContentsLostError, MechanismError
from sleepbackends.vmm import places
from sleepbackends.vmm.fingerprint import Span, host_fingerprint
from sleepbackends.vmm.packing import host
from sleepbackends.vmm.places import Saved
from sleepbackends.vmm.segment import Range


class PackedBytes:
    """Saved bytes that are packed, in one piece of memory.

    Parameters
    ----------
    saved : Saved
        Where they are. They stay there for as long as this is used.
    """

    def __init__(self, saved: Saved) -> None:
        self._saved = saved

    def unpack(self, target: int, size_bytes: int, start: int = 0) -> None:
        """Unpack some of what was packed, counted from its first byte, to an address.

        Raises
        ------
        ContentsLostError
            If the packed bytes are known to be damaged.
        StorageError
            If they cannot be read.
        """
        saved = self._saved
        # Without a view: as long as there is one, however forgotten, the memory stays.
        address = saved.address if isinstance(saved, Range) else _address(self._read)
        host.unpack(Span(address, saved.size_bytes), target, size_bytes, start)

    @cached_property
    def _read(self) -> bytearray:
        return bytearray(self._saved.view(0, self._saved.size_bytes))


def unpacked(saved: Saved, start: int, size_bytes: int) -> memoryview:
    """Return some of what was packed, read-only; raises what ``PackedBytes.unpack`` raises."""
    found = bytearray(size_bytes)
    PackedBytes(saved).unpack(_address(found), size_bytes, start)
    return memoryview(found).toreadonly()


def fingerprint_of_packed(saved: Saved, size_bytes: int) -> int:
    """Return the fingerprint of what was packed; raises what ``PackedBytes.unpack`` raises."""
    found = bytearray(size_bytes)
    PackedBytes(saved).unpack(_address(found), size_bytes)
    return host_fingerprint(_address(found), size_bytes)


class UnpackedPiece:
    """Some of what was packed, to be unpacked into a buffer on its way up: a ``Place``.

    Parameters
    ----------
    packed : PackedBytes
        The packed bytes.
    start, size_bytes : int
        Which bytes of what was packed.
    """

    host = None
    pinned = False

    def __init__(self, packed: PackedBytes, start: int, size_bytes: int) -> None:
        self._packed = packed
        self._start = start
        self.size_bytes = size_bytes

    def write(self, source: int) -> None:
        """Refuse: nothing is saved this way.

        Raises
        ------
        MechanismError
            Always.
        """
        raise MechanismError("packed bytes are written by whoever packed them")

    def read(self, target: int) -> bool:
        """Unpack to an address; tell whether the packed bytes are sound.

        Raises
        ------
        StorageError
            If they cannot be read.
        """
        try:
            self._packed.unpack(target, self.size_bytes, self._start)
        except ContentsLostError:
            return False
        return True


def unpacked_pieces(span: Span, saved: Saved) -> Iterator[tuple[int, UnpackedPiece]]:
    """List copies of what was packed that need no device memory: where to, and from what."""
    packed = PackedBytes(saved)
    for start in range(0, span.size_bytes, places.BUFFER_BYTES):
        size_bytes = min(places.BUFFER_BYTES, span.size_bytes - start)
        yield span.address + start, UnpackedPiece(packed, start, size_bytes)


def _address(found: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(found))
