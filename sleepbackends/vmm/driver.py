"""What a device driver has to offer, and nothing more.

Extents (``sleepbackends.vmm.address_space``) are created, mapped and unmapped by the native
library; a driver copies, fills, waits, pins host memory and says what the device has.
"""

from __future__ import annotations

from typing import Literal, Protocol

LaneUse = Literal["copy", "fill"]
"""Filling goes on beside copying, which leaves almost all of the device's memory speed."""


class Event(Protocol):
    """A point in the work of a lane."""

    def done(self) -> bool:
        """Tell whether the work before it has finished, without waiting."""
        ...

    def wait(self) -> None:
        """Wait until the work before it has finished, letting other threads run.

        Raises
        ------
        MechanismError
            If that work failed.
        """
        ...


class Lane(Protocol):
    """Work that one device does in order, while others do theirs.

    Addresses and sizes are in bytes. A call that queues work raises ``MechanismError`` if
    the driver refuses it.
    """

    def to_host(self, host: int, address: int, size_bytes: int) -> None:
        """Queue a copy from the device into host memory.

        Where that is not pinned, the copy has been made when this returns.
        """
        ...

    def to_device(self, address: int, host: int, size_bytes: int) -> None:
        """Queue a copy from host memory to the device.

        Where that is not pinned, the bytes have been read when this returns.
        """
        ...

    def fill(self, address: int, size_bytes: int, byte: int) -> None:
        """Queue setting every byte."""
        ...

    def event(self) -> Event:
        """Mark this point of the lane."""
        ...

    def wait(self) -> None:
        """Wait for everything queued so far, letting other threads run.

        Raises
        ------
        MechanismError
            If any of it failed.
        """
        ...


class Driver(Protocol):
    """One driver of one process."""

    def lane(self, device: int, use: LaneUse) -> Lane:
        """Return the lane of a device that copies or fills for us; always the same."""
        ...

    def synchronize(self, device: int) -> None:
        """Wait for everything that anybody queued on the device.

        Raises
        ------
        MechanismError
            If any of it failed.
        """
        ...

    def free_bytes(self, device: int) -> int:
        """Return how much memory the device has left; other processes move it."""
        ...

    def pin(self, host: int, size_bytes: int) -> None:
        """Register host memory, so that the device copies from and to it at full speed.

        Raises
        ------
        HostMemoryError
            If the driver refuses.
        """
        ...

    def unpin(self, host: int) -> None:
        """Undo ``pin``.

        Raises
        ------
        MechanismError
            If the driver refuses; the memory is still registered.
        """
        ...

    def close(self) -> None:
        """Give up the lanes, which must be idle."""
        ...

    def check(self, code: int, what: str, *, needed_bytes: int = 0, device: int = 0) -> None:
        """Raise the error that a code of the native library or the driver stands for.

        Raises
        ------
        DeviceMemoryError
            The device has not enough memory.
        MechanismError
            Anything else but success.
        """
        ...
