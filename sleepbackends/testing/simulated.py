"""A backend over simulated memory: any capability, a budget, and accesses that fault."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sleepbackends.availability import Availability
from sleepbackends.base import BaseBackend
from sleepbackends.capabilities import IN_PROCESS, Capabilities
from sleepbackends.control import Control
from sleepbackends.errors import DeviceMemoryError
from sleepbackends.ledger import Block
from sleepbackends.mechanism import POISON_BYTE, Fill
from sleepbackends.settings import BackendSettings

ALL = IN_PROCESS
"""Everything that memory kept by one process can promise."""


@dataclass
class SimulatedOptions:
    """What the simulated device is like.

    Parameters
    ----------
    capabilities : Capabilities
        What the backend says it can do.
    budget_bytes : int
        How much may be mapped at once; may be changed while it runs, as a neighbour would.
    """

    capabilities: Capabilities = field(default_factory=lambda: ALL)
    budget_bytes: int = 1 << 40


class SimulatedMemory:
    """One allocation; touching it while it is not mapped raises, as a device would fault."""

    def __init__(self, backend: SimulatedBackend, address: int) -> None:
        self._backend = backend
        self.address = address

    def _bytes(self) -> bytearray:
        if self.address not in self._backend.mapped:
            raise RuntimeError(f"illegal access to unmapped memory at {self.address:#x}")
        return self._backend.mapped[self.address]

    def read(self) -> bytes:
        """Return all its bytes."""
        return bytes(self._bytes())

    def write(self, data: bytes) -> None:
        """Overwrite all its bytes."""
        self._bytes()[:] = data

    def free(self) -> None:
        """Give it back, in whatever residency it is."""
        self._backend.free(self.address)


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
    """Keeps "device memory" in byte arrays and saved bytes beside them."""

    name = "simulated"

    def __init__(
        self, options: SimulatedOptions | None = None, settings: BackendSettings | None = None
    ) -> None:
        self.device = options or SimulatedOptions()
        super().__init__(self.device, settings)
        self.capabilities = self.device.capabilities
        self.mapped: dict[int, bytearray] = {}
        self.saved: dict[int, bytes] = {}
        self._next_address = 1 << 20

    @classmethod
    def probe(cls) -> Availability:
        """Say that it works everywhere."""
        return Availability(True, "simulated memory")

    @contextmanager
    def region(self, tag: str) -> Iterator[SimulatedRegion]:
        """Open a scope whose allocations carry the tag."""
        yield SimulatedRegion(self, self.open_tag(tag))

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the budget in use."""
        return sum(map(len, self.mapped.values()))

    def allocate(self, tag: str, size_bytes: int) -> Block:
        """Map a new block of zeros.

        Raises
        ------
        DeviceMemoryError
            If the budget is used up; nothing was allocated.
        """
        self._check_budget(size_bytes)
        address = self._next_address
        self._next_address += max(size_bytes, 1)
        self.mapped[address] = bytearray(size_bytes)
        return Block(address, size_bytes, tag, device="simulated")

    def _check_budget(self, needed_bytes: int) -> None:
        available = self.device.budget_bytes - self.mapped_bytes
        if needed_bytes > available:
            raise DeviceMemoryError(
                f"{needed_bytes} bytes needed, {available} available",
                hint="let a neighbour give memory back",
                needed_bytes=needed_bytes,
                available_bytes=available,
            )

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        """Copy the bytes aside."""
        for block in blocks:
            self.saved[block.address] = bytes(self.mapped[block.address])
            control.advance(block.size_bytes)
            yield block

    def unmap(self, block: Block) -> None:
        """Make accesses fault."""
        del self.mapped[block.address]

    def reserve(self, blocks: Sequence[Block]) -> None:
        """Check the budget."""
        self._check_budget(sum(block.size_bytes for block in blocks))

    def map(self, block: Block) -> None:
        """Put stale bytes behind the address, as a device may."""
        if block.address in self.mapped:
            raise RuntimeError(f"{block.address:#x} is mapped already")
        self.mapped[block.address] = bytearray(b"\xee" * block.size_bytes)

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        """Copy the bytes back."""
        for block in blocks:
            self.mapped[block.address][:] = self.saved[block.address]
            control.advance(block.size_bytes)
            yield block

    def fill(self, block: Block, fill: Fill) -> None:
        """Overwrite the stale bytes."""
        if fill is not Fill.NONE:
            byte = POISON_BYTE if fill is Fill.POISON else 0
            self.mapped[block.address][:] = bytes([byte]) * block.size_bytes

    def forget(self, block: Block) -> None:
        """Drop the saved bytes."""
        self.saved.pop(block.address, None)

    def release(self, block: Block) -> None:
        """Give the block back for good."""
        self.mapped.pop(block.address, None)
        self.forget(block)
