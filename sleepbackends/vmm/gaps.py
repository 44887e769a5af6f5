"""Which bytes of a stretch are free: the first gap is used first, gaps that meet are joined."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import TypeVar

RangeT = TypeVar("RangeT")
GapsT = TypeVar("GapsT", bound="Gaps")


class Gaps:
    """A stretch of bytes, free at first."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.free_bytes = size_bytes
        self._gaps = [(0, size_bytes)]

    def carve(self, size_bytes: int) -> tuple[int, int]:
        """Take up to so many bytes from the first gap; return their offset and how many."""
        offset, room = self._gaps[0]
        taken = min(room, size_bytes)
        if taken == room:
            del self._gaps[0]
        else:
            self._gaps[0] = (offset + taken, room - taken)
        self.free_bytes -= taken
        return offset, taken

    def carve_whole(self, size_bytes: int) -> int | None:
        """Take so many bytes from the first gap that has them; return their offset, or None."""
        for at, (offset, room) in enumerate(self._gaps):
            if room >= size_bytes:
                rest = [(offset + size_bytes, room - size_bytes)] if room > size_bytes else []
                self._gaps[at : at + 1] = rest
                self.free_bytes -= size_bytes
                return offset
        return None

    def give_back(self, offset: int, size_bytes: int) -> None:
        """Return bytes, and join the gaps on either side."""
        self.free_bytes += size_bytes
        at = bisect.bisect(self._gaps, (offset, 0))
        if at < len(self._gaps) and self._gaps[at][0] == offset + size_bytes:
            size_bytes += self._gaps.pop(at)[1]
        if at and sum(self._gaps[at - 1]) == offset:
            before, room = self._gaps.pop(at - 1)
            offset, size_bytes, at = before, room + size_bytes, at - 1
        self._gaps.insert(at, (offset, size_bytes))


def carve_all(
    stretches: Sequence[GapsT],
    sizes: Sequence[int],
    make: Callable[[GapsT, int, int], RangeT],
) -> list[list[RangeT]]:
    """Carve ranges of these sizes, in all no more than is free, from one stretch after another."""
    following = iter(stretches)
    stretch = next(following, None)
    carved = []
    for size in sizes:
        ranges: list[RangeT] = []
        while size and stretch is not None:
            offset, taken = stretch.carve(size)
            ranges.append(make(stretch, offset, taken))
            size -= taken
            if not stretch.free_bytes:
                stretch = next(following, None)
        carved.append(ranges)
    return carved
