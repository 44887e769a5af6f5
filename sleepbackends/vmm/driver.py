"""What a device driver has to offer, and nothing more.

Extents (``sleepbackends.vmm.address_space``) are created, mapped and unmapped by the native
library; a driver copies, fills, hashes, waits, pins host memory and says what the device has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from sleepbackends.vmm.fingerprint import Pending, Span
    from sleepbackends.vmm.packing.protocol import Packing

Direction = Literal["down", "up"]
"""From the device to the host, or back."""

LaneUse = Literal["copy", "fill", "hash", "pack", "stage"]
"""Filling, hashing and packing go on beside copying, which leaves almost all of the device's
memory speed; staging goes on beside the engine."""

DOING: dict[LaneUse, str] = {
    "copy": "copying",
    "fill": "filling",
    "hash": "hashing",
    "pack": "packing",
    "stage": "staging",
}
"""What a lane is for, in messages."""


KernelUse = Literal["fingerprint", "packing"]
"""What kernels of ours are for."""


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

    def copy_all(self, direction: Direction, copies: Iterable[tuple[int, int, int]]) -> None:
        """Queue copies of device address, host address and size, each when it is taken.

        Whoever makes the copies may queue other work meanwhile.
        """
        ...

    def fill(self, address: int, size_bytes: int, byte: int) -> None:
        """Queue setting every byte."""
        ...

    def event(self) -> Event:
        """Mark this point of the lane."""
        ...

    def wait_for(self, event: Event) -> None:
        """Have whatever is queued from now on begin after an event of the same driver.

        The event may be one of another lane, and given up before it is there.

        Raises
        ------
        MechanismError
            If the driver refuses.
        """
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

    @property
    def device_count(self) -> int:
        """How many devices this process sees."""
        ...

    def pci_address(self, device: int) -> str | None:
        """Return where a device is attached, as ``0000:3b:00.0``; None if that is not known.

        Raises
        ------
        MechanismError
            If the driver failed.
        """
        ...

    def aside(self) -> AbstractContextManager[None]:
        """Let what this thread calls disturb no graph that another thread is capturing.

        For what is done beside an engine.
        """
        ...

    def lane(self, device: int, use: LaneUse) -> Lane:
        """Return the lane of a device for one kind of our work; always the same."""
        ...

    def fingerprint(self, device: int, spans: Sequence[Span]) -> Pending | None:
        """Queue the fingerprints of memory, on a lane of their own, and return what will have them.

        Returns at once, and never raises because something is missing: None says that this
        driver cannot do it here or now. Several results may be outstanding, while copies run.
        The memory is only read. What was queued on other lanes and streams before is not waited
        for.

        Parameters
        ----------
        device : int
            Ordinal of the device whose memory it is.
        spans : sequence of Span
            What to hash; mapped until the results are there. A span that is not ends the
            device's context.
        """
        ...

    def packing(self, device: int) -> Packing | None:
        """Return what packs the memory of a device; the same one until the driver is closed.

        Never raises because something is missing: None says that this driver cannot do it here
        or now. The first call may take a while, and wait for what is running on the device.
        """
        ...

    def compile(self, device: int, use: KernelUse) -> None:
        """Have the kernels of a device compiled, which may take seconds, and load nothing.

        Never raises because something is missing. Whoever needs them meanwhile waits.
        """
        ...

    def load(self, device: int, use: KernelUse) -> None:
        """Have the kernels of a device there, with the device memory they take.

        It may wait for what is running on the device. Never raises because something is missing.
        """
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

    def reclaim(self, device: int) -> None:
        """Have memory that was given up ready for whoever allocates next.

        It takes the least memory there is and gives it back; a driver on which that serves
        nothing does nothing.

        Raises
        ------
        DeviceMemoryError
            If others have all of the device.
        MechanismError
            If the driver failed.
        """
        ...

    def read(self, address: int, size_bytes: int, device: int) -> bytes:
        """Copy device memory to the host, after everything that was queued on the device."""
        ...

    def write(self, address: int, data: bytes, device: int) -> None:
        """Copy host bytes to device memory, and wait for it."""
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
