"""Packed bytes that the processor unpacks: to be looked at, or where the device has no room."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
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
        Where they are.
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
        packed, _kept = self._memory
        host.unpack(packed, target, size_bytes, start)

    def hold(self) -> None:
        """Keep the packed bytes as they are now where they are; raises what ``unpack`` raises."""
        self._memory  # noqa: B018 - reads them where that is necessary

    @cached_property
    def _memory(self) -> tuple[Span, object]:
        """Where they are, and what keeps them there."""
        saved = self._saved
        if isinstance(saved, Range):
            return Span(saved.address, saved.size_bytes), saved.view(0, saved.size_bytes)
        found = bytearray(saved.view(0, saved.size_bytes))
        return Span(_address(found), len(found)), found


def unpacked(saved: Saved, start: int, size_bytes: int) -> memoryview:
    """Return some of what was packed, read-only; raises what ``PackedBytes.unpack`` raises."""
    found = bytearray(size_bytes)
    PackedBytes(saved).unpack(_address(found), size_bytes, start)
    return memoryview(found).toreadonly()


def fingerprinting(saved: Saved, size_bytes: int) -> Callable[[], int]:
    """Return what tells the fingerprint of what was packed; the bytes stay there until it has."""
    packed = PackedBytes(saved)
    packed.hold()

    def compute() -> int:
        found = bytearray(size_bytes)
        packed.unpack(_address(found), size_bytes)
        return host_fingerprint(_address(found), size_bytes)

    return compute


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
