"""Where saved bytes are: what memory and files have in common for whoever saves and restores.

A store gives room for blocks, as slots; a slot consists of ranges; a range is copied piece by
piece. Each piece is a place that a device copies to itself, or that host threads fill and empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

from sleepbackends.hostmemory import driver as host

Retention = Literal["retain", "release", "none"]
"""What becomes of room once its bytes are restored: kept for the next sleep, given back in the
background, or given back at once."""

Room = Sequence[Any]
"""Ranges of a store that belong together, in the order of the bytes in them."""

BUFFER_BYTES = 8 << 20
"""The most that a place holds which a device does not copy to itself."""


class Place(Protocol):
    """Consecutive saved bytes that are copied as one."""

    @property
    def host(self) -> int | None:
        """Their address; None where they are not in memory."""
        ...

    @property
    def size_bytes(self) -> int:
        """How many there are; at most ``BUFFER_BYTES`` unless they are pinned."""
        ...

    @property
    def pinned(self) -> bool:
        """Whether a device copies from and to them at full speed."""
        ...

    def write(self, source: int) -> None:
        """Fill the place with the bytes at an address, letting other threads run.

        Raises
        ------
        StorageFullError, StorageError
            If they cannot be written: the place holds anything.
        """
        ...

    def read(self, target: int) -> bool:
        """Copy the bytes to an address, letting other threads run; tell whether they are sound.

        Raises
        ------
        StorageError
            If they cannot be read.
        """
        ...


class Saved(Protocol):
    """Room for consecutive bytes: a range of a store, or several."""

    @property
    def size_bytes(self) -> int:
        """How many bytes it holds."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether there is nothing behind it, so that it is not worth keeping."""
        ...

    def pieces(self) -> Iterator[Place]:
        """Go through its places, each once it can be used.

        Raises
        ------
        HostMemoryError
            If there is no memory for one.
        """
        ...

    def wait(self) -> None:
        """Wait until all of it can be used; raises what ``pieces`` raises."""
        ...

    def view(self, start: int, size_bytes: int) -> memoryview:
        """Return some of its bytes, read-only, counted from its first.

        Raises
        ------
        ContentsLostError
            If they are known to be damaged.
        StorageError
            If they cannot be read.
        """
        ...

    def is_followed_by(self, other: Any) -> bool:
        """Tell whether a view may go on from the end of this range into another."""
        ...

    def fingerprinting(self) -> Callable[[], int]:
        """Return what tells the fingerprint of the bytes, which stay there until it has."""
        ...


class Slot:
    """Room for the saved bytes of one block, wherever there was some."""

    def __init__(self, ranges: Room) -> None:
        self.ranges: Room = ranges

    @property
    def size_bytes(self) -> int:
        """How many bytes it holds."""
        return sum(part.size_bytes for part in self.ranges)

    @property
    def has_failed(self) -> bool:
        """Whether there is nothing behind some of it."""
        for part in self.ranges:  # noqa: SIM110 - asked of every block; a generator costs the most
            if part.has_failed:
                return True
        return False


class Store(Protocol):
    """Gives room for saved bytes."""

    @property
    def unit_bytes(self) -> int:
        """What each range it is cut into begins at a multiple of."""
        ...

    @property
    def chunk_limit_bytes(self) -> int | None:
        """The most bytes that can be compared, and copied or not, as one."""
        ...

    @property
    def fingerprints_all(self) -> bool:
        """Whether it knows the fingerprints of what was saved without further work."""
        ...

    @property
    def retains(self) -> bool:
        """Whether room is kept that is not needed now."""
        ...

    @property
    def held_bytes(self) -> int:
        """How much room is held now, used or not."""
        ...

    @property
    def used_bytes(self) -> int:
        """How much of it holds something."""
        ...

    def check_room(self, size_bytes: int) -> None:
        """Check that slots of so many bytes in all can be had.

        Raises
        ------
        NoRoomError
            If they cannot.
        """
        ...

    def take(
        self, sizes: Sequence[int], *, devices: Sequence[int] = (), at_ease: bool = False
    ) -> list[Slot]:
        """Take slots of these sizes, multiples of ``unit_bytes``, each for a device's bytes.

        At ease, the engine is not to notice how they are made ready, and it may take time.

        Raises
        ------
        NoRoomError
            If there is not enough; nothing was taken.
        """
        ...

    def writable(
        self, rooms: Sequence[Room], sizes: Sequence[int], *, devices: Sequence[int] = ()
    ) -> list[Room]:
        """Return where so many new bytes of each device may go in place of each room.

        That is the room itself, with more ranges if it is too small, or new room if others
        read it.

        Raises
        ------
        NoRoomError
            If there is not enough; nothing was taken.
        """
        ...

    def give_back(self, slot: Slot) -> None:
        """Give a slot back; the room is kept or given back as the policy says."""
        ...

    def trim(self) -> int:
        """Give back what holds nothing; return the bytes."""
        ...

    def close(self) -> None:
        """Give everything back. Repeating the call does nothing."""
        ...


def extended(
    store: Store, rooms: Sequence[Room], sizes: Sequence[int], devices: Sequence[int] = ()
) -> list[Room]:
    """Return the rooms, with more ranges where they are smaller than asked for.

    Raises
    ------
    NoRoomError
        If there is not enough; nothing was taken.
    """
    missing = [
        max(0, size - sum([part.size_bytes for part in room]))
        for room, size in zip(rooms, sizes, strict=True)
    ]
    if not any(missing):
        return list(rooms)
    unit_bytes = store.unit_bytes
    wanted = [host.round_up(more, unit_bytes) for more in missing if more]
    of_devices = [device for device, more in zip(devices, missing, strict=False) if more]
    slots = iter(store.take(wanted, devices=of_devices))
    return [
        [*room, *next(slots).ranges] if more else room
        for room, more in zip(rooms, missing, strict=True)
    ]
