"""Saved bytes that did not find room in one piece."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

from sleepbackends.vmm.fingerprint import host_fingerprint
from sleepbackends.vmm.places import Place, Room, Saved


class Joined:
    """Several ranges of a store, one after another, as one: ``Saved``.

    Parameters
    ----------
    parts : sequence of Saved
        The ranges.
    """

    def __init__(self, parts: Sequence[Saved]) -> None:
        self._parts = parts
        self.size_bytes = sum(part.size_bytes for part in parts)

    @property
    def has_failed(self) -> bool:
        """Whether there is nothing behind some of it."""
        return any(part.has_failed for part in self._parts)

    def pieces(self) -> Iterator[Place]:
        """Go through the places of all ranges, each once it can be used.

        Raises
        ------
        HostMemoryError
            If there is no memory for one.
        """
        for part in self._parts:
            yield from part.pieces()

    def wait(self) -> None:
        """Wait until all of it can be used; raises what ``pieces`` raises."""
        for part in self._parts:
            part.wait()

    def view(self, start: int, size_bytes: int) -> memoryview:
        """Return a copy of some of its bytes, counted from its first.

        Raises
        ------
        ContentsLostError
            If they are known to be damaged.
        StorageError
            If they cannot be read.
        """
        found = bytearray()
        for part in self._parts:
            step = min(size_bytes - len(found), part.size_bytes - start)
            if step > 0:
                found += part.view(start, step)
            start = max(0, start - part.size_bytes)
        return memoryview(found).toreadonly()

    def is_followed_by(self, other: object) -> bool:
        """Tell that a view of it ends with it."""
        return False

    def fingerprinting(self) -> Callable[[], int]:
        """Return what computes the fingerprint of the bytes; they are read at once."""
        found = bytearray(self.view(0, self.size_bytes))
        return lambda: host_fingerprint(
            ctypes.addressof(ctypes.c_char.from_buffer(found)), len(found)
        )


def first_bytes(room: Room, size_bytes: int) -> Saved:
    """Return the first bytes of a room as one; nothing is known of what was saved there."""
    parts: list[Saved] = []
    for part in room:
        step = min(size_bytes, part.size_bytes)
        parts.append(part.part(0, step))
        size_bytes -= step
        if not size_bytes:
            break
    return parts[0] if len(parts) == 1 else Joined(parts)
