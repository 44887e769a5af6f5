"""What is copied between a device and a host where saved bytes are packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from sleepbackends.errors import MechanismError
from sleepbackends.hostmemory import driver as memory
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.packing.layout import HEADER_BYTES, Header, Layout
from sleepbackends.vmm.places import Place, Saved


class Packed(NamedTuple):
    """How bytes are packed.

    Parameters
    ----------
    layout : Layout
        In which layout.
    size_bytes : int
        To how many bytes.
    """

    layout: Layout
    size_bytes: int


@dataclass(slots=True, eq=False)
class Transfer:
    """A copy of packed bytes, by way of a slot on the device.

    Parameters
    ----------
    span : Span
        What is packed, or unpacked, on the device.
    saved : Saved
        Where the packed bytes are on the host: all of it.
    """

    span: Span
    saved: Saved

    def places(self) -> Iterator[Place]:
        """Go through where the packed bytes are on the host, each once it can be used.

        Raises
        ------
        HostMemoryError
            If there is no memory for one.
        """
        return self.saved.pieces()


@dataclass(slots=True, eq=False)
class Down(Transfer):
    """A copy to the host.

    Parameters
    ----------
    layout : Layout
        How to pack.
    is_checked : bool
        Whether it fails if the memory changed while it was being packed. What is saved in memory
        is looked at by whoever asks for the copy, once it is there.
    slot_address : int
        Where the packed bytes are on the device, until the slot is used again; 0 before.
    """

    layout: Layout
    is_checked: bool = False
    slot_address: int = 0

    def places(self) -> Iterator[Place]:
        """Go through where the packed bytes are on the host, each once it can be used."""
        must_be_whole = self.is_checked
        for place in self.saved.pieces():
            yield _Checked(place) if must_be_whole and place.host is None else place
            must_be_whole = False


@dataclass(slots=True, eq=False)
class Up(Transfer):
    """A copy to the device, whose header says how it was packed."""


class _Checked:
    """A place whose packed bytes are looked at before they are written."""

    host = None
    pinned = False

    def __init__(self, place: Place) -> None:
        self._place = place
        self.size_bytes = place.size_bytes

    def write(self, source: int) -> None:
        """Write the bytes at an address, if they are good.

        Raises
        ------
        MechanismError
            If they are not.
        StorageFullError, StorageError
            If they cannot be written.
        """
        check_whole(memory.view(source, HEADER_BYTES))
        self._place.write(source)

    def read(self, target: int) -> bool:
        """Copy the bytes to an address; tell whether they are sound."""
        return self._place.read(target)


def check_whole(packed: memoryview) -> None:
    """Check that somebody who was to leave the memory alone did, by the first packed bytes.

    Raises
    ------
    MechanismError
        If not: the packed bytes are of no use.
    """
    header = Header.read(packed)
    if header is None or not header.is_whole:
        raise MechanismError(
            "memory changed while it was being packed",
            hint="repeat the suspend, with nobody using the memory",
        )
