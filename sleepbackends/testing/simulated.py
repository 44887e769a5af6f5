"""A backend over a simulated device: any capability, and everything can be seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sleepbackends.availability import Availability
from sleepbackends.base import BaseBackend
from sleepbackends.capabilities import IN_PROCESS, Capabilities
from sleepbackends.control import Control
from sleepbackends.ledger import Block
from sleepbackends.mechanism import POISON_BYTE, Fill
from sleepbackends.settings import BackendSettings
from sleepbackends.testing.device import SimulatedDevice

ALL = IN_PROCESS
"""Everything that memory kept by one process can promise."""


@dataclass
class SimulatedOptions:
    """What the backend says it can do, and where its memory is.

    Parameters
    ----------
    capabilities : Capabilities
        What the backend says it can do.
    device : SimulatedDevice
        Where its memory is; backends that are given the same one share its budget.
    """

    capabilities: Capabilities = field(default_factory=lambda: ALL)
    device: SimulatedDevice = field(default_factory=SimulatedDevice)


class SimulatedMemory:
    """One allocation; touching it while it is not mapped raises, as a device would fault."""

    def __init__(self, backend: SimulatedBackend, address: int) -> None:
        self._backend = backend
        self.address = address

    def read(self) -> bytes:
        """Return all its bytes."""
        return bytes(self._backend.device.memory(self.address))

    def write(self, data: bytes) -> None:
        """Overwrite all its bytes."""
        self._backend.device.memory(self.address)[:] = data

    def free(self) -> None:
        """Give it back, in whatever residency it is."""
        self._backend.free(self.address)

    def record_copy(self, source: SimulatedMemory) -> Callable[[], None]:
        """Record a copy from other memory into this; both addresses are part of the record."""
        device, to, start = self._backend.device, self.address, source.address

        def replay() -> None:
            target, data = device.memory(to), device.memory(start)
            size = min(len(target), len(data))
            target[:size] = data[:size]

        return replay


class SimulatedRegion:
    """Allocates under one tag."""

    def __init__(self, backend: SimulatedBackend, tag: str) -> None:
        self._backend = backend
        self._tag = tag

    def buffer(self, size_bytes: int) -> SimulatedMemory:
        """Allocate.

        Raises
        ------
        DeviceMemoryError
            If the budget is used up; nothing was allocated.
        """
        return SimulatedMemory(
            self._backend,
            self._backend.enter(lambda: self._backend.allocate(self._tag, size_bytes)).address,
        )


class SimulatedBackend(BaseBackend[SimulatedOptions]):
    """Keeps blocks on a ``SimulatedDevice`` and saved bytes beside it.

    Attributes
    ----------
    device : SimulatedDevice
        Where blocks are mapped.
    saved : dict of int to bytes
        Saved bytes, by address.
    """

    name = "simulated"

    def __init__(
        self, options: SimulatedOptions | None = None, settings: BackendSettings | None = None
    ) -> None:
        chosen = options or SimulatedOptions()
        super().__init__(chosen, settings)
        self.device = chosen.device
        self.capabilities = chosen.capabilities
        self.saved: dict[int, bytes] = {}

    @classmethod
    def probe(cls) -> Availability:
        """Say that it works everywhere."""
        return Availability(True, "simulated memory")

    @contextmanager
    def region(self, tag: str) -> Iterator[SimulatedRegion]:
        """Open a scope whose allocations carry the tag."""
        yield SimulatedRegion(self, self.open_tag(tag))

    @property
    def mapped(self) -> dict[int, bytearray]:
        """What is mapped on the device, by address."""
        return self.device.mapped

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the device's budget in use."""
        return self.device.used_bytes

    def allocate(self, tag: str, size_bytes: int) -> Block:
        """Map a new block of zeros.

        Raises
        ------
        DeviceMemoryError
            If the budget is used up; nothing was allocated.
        """
        address = self.device.reserve_range(size_bytes)
        self.device.map(address, size_bytes)
        self.device.memory(address)[:] = bytes(size_bytes)
        return Block(address, size_bytes, tag, device="simulated")

    def synchronize(self, blocks: Sequence[Block]) -> None:
        """Wait for the device."""
        self.device.synchronize()

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        """Copy the bytes aside."""
        for block in blocks:
            self.saved[block.address] = self.device.read(block.address)
            control.advance(block.size_bytes)
            yield block

    def unmap(self, block: Block) -> None:
        """Make accesses fault."""
        self.device.unmap(block.address)

    def reserve(self, blocks: Sequence[Block]) -> None:
        """Check the budget."""
        self.device.check_room(sum(block.size_bytes for block in blocks))

    def map(self, block: Block) -> None:
        """Put stale bytes behind the address, as a device may."""
        self.device.map(block.address, block.size_bytes)

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        """Copy the bytes back."""
        for block in blocks:
            self.device.write(block.address, self.saved[block.address])
            control.advance(block.size_bytes)
            yield block

    def fill(self, block: Block, fill: Fill) -> None:
        """Overwrite the stale bytes."""
        if fill is not Fill.NONE:
            byte = POISON_BYTE if fill is Fill.POISON else 0
            self.device.write(block.address, bytes([byte]) * block.size_bytes)

    def forget(self, block: Block) -> None:
        """Drop the saved bytes."""
        self.saved.pop(block.address, None)

    def release(self, block: Block) -> None:
        """Give the block back for good."""
        if block.placement.mapped:
            self.device.unmap(block.address)
        self.forget(block)
