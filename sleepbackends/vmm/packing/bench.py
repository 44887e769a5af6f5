"""A few slots of device memory that packed bytes pass through, and the order of who uses them.

Down: a span is packed into a slot on the lane for packing, the lane that copies waits for that on
the device, and the slot is used again once the copy is over. Up: the copy goes first. All of it
is queued; the host waits for a slot only where a copy goes through the ring, whose threads queue
it whenever they come to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from sleepbackends.vmm.driver import Event, Lane
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.packing.protocol import Packing, Slots
from sleepbackends.vmm.packing.transfer import Down, Transfer, Up


@dataclass(slots=True)
class BenchSlot:
    """One slot, and who is not done with it.

    Parameters
    ----------
    address : int
        Where it is on the device.
    used : Event, optional
        What its bytes are needed until.
    copies : list of Future
        Copies that the ring makes. They tell whether the bytes are sound.
    unpacking : Up, optional
        What is to be unpacked once those copies are made.
    """

    address: int
    used: Event | None = None
    copies: list[Future[bool]] = field(default_factory=list)
    unpacking: Up | None = None


class Bench:
    """The slots of one device.

    Parameters
    ----------
    packing : Packing
        Packs and unpacks.
    lane : Lane
        Where it does.
    slots : Slots
        The device memory.
    scratch : bool
        Whether half of the slots are for looking at what was packed.
    """

    def __init__(
        self, packing: Packing, lane: Lane, slots: Slots, *, scratch: bool = False
    ) -> None:
        self.packing = packing
        self.lane = lane
        addresses = slots.addresses
        count = len(addresses) // 2 if scratch else len(addresses)
        self.scratch: Sequence[int] = addresses[count:]
        self.size_bytes = slots.size_bytes
        self._device_memory = slots
        self._slots = [BenchSlot(address) for address in addresses[:count]]
        self._next = 0

    @property
    def count(self) -> int:
        """How many packed spans it holds at a time."""
        return len(self._slots)

    def begin(self, lane: Lane, transfer: Transfer) -> BenchSlot:
        """Have a slot that may be copied from, or to, by what is queued on a lane next."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        self._finish(slot)
        if isinstance(transfer, Down):
            self._pack(transfer, slot)
            lane.wait_for(self.lane.event())
        elif slot.used is not None:
            lane.wait_for(slot.used)
        return slot

    def end(self, lane: Lane, transfer: Transfer, slot: BenchSlot) -> None:
        """Note that all copies of a slot were queued, or given to the ring."""
        slot.used = lane.event()
        if isinstance(transfer, Up):
            if slot.copies:
                slot.unpacking = transfer
            else:
                self._unpack(transfer, slot, slot.used)

    def finish(self) -> None:
        """Queue what is still to be unpacked, once the ring has made its copies."""
        for slot in self._slots:
            self._finish(slot)

    def forget(self) -> None:
        """Drop what is still to be unpacked: nothing is under way, and nobody needs it."""
        for slot in self._slots:
            slot.used, slot.unpacking = None, None
            slot.copies.clear()

    def close(self) -> bool:
        """Give the device memory back, which nobody uses any more; see ``Slots.close``."""
        self._slots.clear()
        return self._device_memory.close()

    def _finish(self, slot: BenchSlot) -> None:
        if not slot.copies:
            return
        wait(slot.copies)
        slot.copies.clear()
        transfer, slot.unpacking = slot.unpacking, None
        # What the ring copied is there, unless it is damaged, as whoever asked is told; what
        # others did is before the event.
        if transfer is not None and slot.used is not None:
            self._unpack(transfer, slot, slot.used)

    def _pack(self, transfer: Down, slot: BenchSlot) -> None:
        transfer.slot_address = slot.address
        if slot.used is not None:
            self.lane.wait_for(slot.used)
        size_bytes = transfer.saved.size_bytes
        self.packing.pack(self.lane, transfer.span, transfer.layout, slot.address, size_bytes)

    def _unpack(self, transfer: Up, slot: BenchSlot, landed: Event) -> None:
        self.lane.wait_for(landed)
        source = Span(slot.address, transfer.saved.size_bytes)
        self.packing.unpack(self.lane, source, transfer.span)
        slot.used = self.lane.event()
