"""What is packed, and the device memory that takes: never counted on, and given back.

Where there is no memory for a single slot, bytes are copied as they are, and what is packed
already is unpacked by the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

from sleepbackends.errors import DeviceMemoryError, SleepBackendsError
from sleepbackends.hostmemory import driver as memory
from sleepbackends.vmm.driver import Driver
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.packing.bench import Bench
from sleepbackends.vmm.packing.layout import Choice
from sleepbackends.vmm.packing.protocol import Packing, Slots
from sleepbackends.vmm.packing.transfer import Packed

logger = logging.getLogger(__name__)

PackingMode = Literal["auto", "off"]

LEAST_BYTES = 4 << 20
"""What has fewer is copied as it is. An H200's link is busy with so much for 80 µs, and the host
with packing it for about 50, as measured over the simulated driver: a dozen calls, whatever
the size."""

SLOTS_BYTES = 174 << 20
"""How much device memory the slots of a transition are: 6 for chunks of 32 MiB."""

BESIDE_BYTES = 128 << 20
"""The same beside an engine that is at work: 2, and 2 to look at what was packed."""

LEFT_BESIDE_BYTES = 1 << 30
"""How much device memory has to be left besides those, so that the engine does not miss it."""

MOST_SLOTS = 64
"""How many slots there are at most, where chunks are small."""

_SLOT_UNIT_BYTES = 4096


def most_packed_bytes(size_bytes: int) -> int:
    """Return how many packed bytes are worth it: what does not shrink by a tenth stays as it is."""
    return size_bytes * 9 // 10


def room_bytes(size_bytes: int, packed_bytes: int) -> int:
    """Return how much room to have for packed bytes of which only a guess is known: a bit more."""
    return min(size_bytes, memory.round_up(packed_bytes + packed_bytes // 128, 256))


class Packer:
    """Packing for one backend.

    Parameters
    ----------
    driver : Driver
        Packs, where it can.
    mode : {"auto", "off"}
        Whether to use that.
    largest_bytes : callable
        Tells how large a chunk can be on a device.
    """

    def __init__(
        self, driver: Driver, mode: PackingMode, largest_bytes: Callable[[int], int]
    ) -> None:
        self._driver = driver
        self._mode = mode
        self._largest_bytes = largest_bytes
        # By device, those that cannot be had as well: nobody asks twice.
        self.benches: dict[int, Bench | None] = {}
        self.beside: dict[int, Bench | None] = {}
        self._leaving: list[Bench] = []
        self._ready: set[int] = set()

    def get_ready(self, device: int) -> bool:
        """Have what the driver needs to pack, while nothing depends on the memory it takes.

        It keeps that: were it taken from what a suspend has just given up, there might not be
        enough to resume. Tells whether it is there, or nothing is large enough to be packed.
        """
        if device in self._ready or self._largest_bytes(device) < LEAST_BYTES:
            return True
        packing = self.packing(device)
        if packing is None:
            return False
        try:
            packing.survey([Span(0, 0)]).result()
        except SleepBackendsError as error:
            logger.info("nothing is packed on device %d now: %s", device, error.message)
            return False
        self._ready.add(device)
        return True

    def do_without(self, device: int) -> None:
        """Pack nothing on a device until ``give_back``."""
        self.benches[device] = None

    def bench(self, device: int, *, beside: bool = False) -> Bench | None:
        """Have slots on a device until ``give_back``; None if there is no memory for them.

        Beside an engine at work there are fewer, and only where much memory is left.
        """
        benches = self.beside if beside else self.benches
        if device not in benches:
            packing = self.packing(device)
            benches[device] = None if packing is None else self._new(device, packing, beside)
        return benches[device]

    def survey(
        self, device: int, spans: Sequence[Span], *, beside: bool = False
    ) -> list[Choice | None]:
        """Find out how spans should be packed; None for those that are to be copied as they are.

        Raises
        ------
        MechanismError
            If the device did not get to look at them; they are as they were.
        """
        found: list[Choice | None] = [None] * len(spans)
        large = [number for number, span in enumerate(spans) if span.size_bytes >= LEAST_BYTES]
        benches = self.beside if beside else self.benches
        if not large or (device in benches and benches[device] is None):
            return found
        packing = self.packing(device)
        if packing is None:
            return found
        try:
            pending = packing.survey([spans[number] for number in large])
        except SleepBackendsError as error:
            logger.info("nothing is packed on device %d now: %s", device, error.message)
            return found
        choices = pending.result()
        if any(choices) and self.bench(device, beside=beside) is not None:
            for number, choice in zip(large, choices, strict=True):
                found[number] = choice
        return found

    def measure(
        self,
        device: int,
        spans: Sequence[Span],
        choices: Sequence[Choice | None],
        *,
        beside: bool = False,
    ) -> list[Packed | None]:
        """Find out to how many bytes spans are packed; None for what is to be copied as it is.

        Raises
        ------
        MechanismError
            If the device did not get to look at them; they are as they were.
        """
        found: list[Packed | None] = [None] * len(spans)
        bench = self.bench(device, beside=beside) if any(choices) else None
        if bench is None:
            return found
        chosen = [(number, choice.layout) for number, choice in enumerate(choices) if choice]
        try:
            pending = bench.packing.count(
                [spans[number] for number, _ in chosen], [layout for _, layout in chosen]
            )
        except SleepBackendsError as error:
            logger.info("nothing is packed on device %d now: %s", device, error.message)
            return found
        for (number, layout), escapes in zip(chosen, pending.result(), strict=True):
            size_bytes = spans[number].size_bytes
            packed_bytes = layout.packed_bytes(size_bytes, escapes)
            if packed_bytes <= min(bench.size_bytes, most_packed_bytes(size_bytes)):
                found[number] = Packed(layout, packed_bytes)
        return found

    def give_back(self, devices: Iterable[int], *, beside: bool = False) -> None:
        """Give the slots of devices back, which nothing there uses any more.

        What a driver does not let go of is tried again by the next call.
        """
        benches = self.beside if beside else self.benches
        for device in devices:
            bench = benches.pop(device, None)
            if bench is not None:
                self._leaving.append(bench)
        self._leaving = [bench for bench in self._leaving if not bench.close()]

    def devices(self, *, beside: bool = False) -> list[int]:
        """List the devices on which slots may be held."""
        return list(self.beside if beside else self.benches)

    def packing(self, device: int) -> Packing | None:
        """Return what packs on a device; None if nothing does, or is to."""
        return None if self._mode == "off" else self._driver.packing(device)

    def _new(self, device: int, packing: Packing, beside: bool) -> Bench | None:
        largest_bytes = self._largest_bytes(device)
        slot_bytes = largest_bytes if beside else most_packed_bytes(largest_bytes)
        slot_bytes = memory.round_up(slot_bytes, _SLOT_UNIT_BYTES)
        most_bytes = BESIDE_BYTES if beside else SLOTS_BYTES
        count = min(max(most_bytes // slot_bytes, 2), MOST_SLOTS)
        try:
            left_bytes = self._driver.free_bytes(device) - count * slot_bytes if beside else 0
            if beside and left_bytes < LEFT_BESIDE_BYTES:
                return None
            lane = self._driver.lane(device, "pack")
            take = packing.slots if beside else partial(_some, packing)
            return Bench(packing, lane, take(count // 2 * 2, slot_bytes), scratch=beside)
        except SleepBackendsError as error:
            logger.info("no slots to pack in on device %d: %s", device, error.message)
            return None


def _some(packing: Packing, count: int, slot_bytes: int) -> Slots:
    """Take slots, fewer if there is no room for so many.

    Raises
    ------
    DeviceMemoryError
        If there is no room for one.
    MechanismError
        If the driver failed otherwise.
    """
    while True:
        try:
            return packing.slots(count, slot_bytes)
        except DeviceMemoryError:
            if count == 1:
                raise
            count //= 2
