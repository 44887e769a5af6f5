"""Memory of simulated devices that is packed and unpacked, and what is held for that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.cumem.packing import CudaPacking
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.packing.layout import Layout
from tests.cumem.hashed import usage
from tests.packing import reference_escapes, reference_pack
from tests.simulators.cuda import Simulator

SLOT_BYTES = 300_000


class Device:
    """A device with two slots of its own."""

    def __init__(self, driver: CudaDriver, device: int = 0) -> None:
        packing = driver.packing(device)
        assert isinstance(packing, CudaPacking)
        self.packing = packing
        self.driver = driver
        self.device = device
        self.slots = packing.slots(2, SLOT_BYTES)
        self.lane = driver.lane(device, "pack")

    @property
    def address(self) -> int:
        """Where what is to be packed is, or was."""
        return self.slots.addresses[0]

    @property
    def target(self) -> int:
        """Where packed bytes are."""
        return self.slots.addresses[1]

    def put(self, data: bytes, offset: int = 0) -> Span:
        self.driver.write(self.address + offset, data, self.device)
        return Span(self.address + offset, len(data))

    def read(self, address: int, size_bytes: int) -> bytes:
        return self.driver.read(address, size_bytes, self.device)

    def pack(self, data: bytes, layout: Layout, capacity_bytes: int) -> bytes:
        """Pack between bytes of which none may change."""
        around = capacity_bytes + 64
        self.driver.write(self.target, b"\xee" * around, self.device)
        self.packing.pack(self.lane, self.put(data), layout, self.target, capacity_bytes)
        found = self.read(self.target, around)
        assert found[capacity_bytes:] == b"\xee" * 64
        assert self.read(self.address, len(data)) == data, "it is only read"
        return found[:capacity_bytes]

    def unpack(self, packed: bytes, size_bytes: int) -> bytes:
        self.driver.write(self.target, packed, self.device)
        self.put(b"\xdd" * (size_bytes + 64))
        source, span = Span(self.target, len(packed)), Span(self.address, size_bytes)
        self.packing.unpack(self.lane, source, span)
        found = self.read(self.address, size_bytes + 64)
        assert found[size_bytes:] == b"\xdd" * 64
        return found[:size_bytes]


def triple(layout: Layout) -> tuple[int, int, int]:
    return layout.element_bytes, layout.planes, layout.base


def packed(data: bytes, layout: Layout) -> bytes:
    return reference_pack(data, *triple(layout))


def escapes(data: bytes, layout: Layout) -> int:
    return reference_escapes(data, *triple(layout))


@pytest.fixture
def driver(simulator: Simulator) -> Iterator[CudaDriver]:
    """Checks that closing it gives everything back, once slots are closed."""
    driver = CudaDriver()
    held = usage(simulator), simulator.process_usage().reserved_bytes
    yield driver
    simulator.clear_faults()
    driver.close()
    assert (usage(simulator), simulator.process_usage().reserved_bytes) == held


@pytest.fixture
def device(driver: CudaDriver) -> Iterator[Device]:
    device = Device(driver)
    yield device
    device.slots.close()
