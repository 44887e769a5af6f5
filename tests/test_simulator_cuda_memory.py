"""The simulated CUDA driver through the real bindings: addresses, handles and budgets."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.simulators.cuda import SharedDevices, Simulator
from tests.simulators.cuda.driving import MIB, UNIT_BYTES, Driven, elsewhere, read, write

STALE = bytes([0xD7])
MAPPED = "at = cuda.block().address; read(at)\n"
TOUCHES = {
    "reserved": "read(cuda.reserve())",
    "no access": "at = cuda.reserve()\n"
    "cuda.call('cuMemMap', at, UNIT_BYTES, 0, cuda.create(), 0)\n"
    "read(at)",
    "unmapped": MAPPED + "cuda.call('cuMemUnmap', at, UNIT_BYTES); read(at)",
    "read only": MAPPED
    + "cuda.call('cuMemSetAccess', at, UNIT_BYTES, [cuda.access(0, 'READ')], 1)\n"
    "read(at); write(at, b'x')",
    "freed": "block = cuda.block(); cuda.drop(block); read(block.address)",
}


class TestMapping:
    def test_new_memory_is_stale(self, simulator: Simulator, cuda: Driven) -> None:
        block = cuda.block()
        assert read(block.address, UNIT_BYTES) == STALE * UNIT_BYTES
        write(block.address, b"gone")
        cuda.drop(block)
        assert read(cuda.block().address) == STALE * 4
        simulator.set_stale_byte(None)
        assert read(cuda.block().address) == bytes(4)

    def test_contents_belong_to_the_handle(self, cuda: Driven) -> None:
        first, second = cuda.reserve(), cuda.reserve()
        handle, other = cuda.create(), cuda.create()
        cuda.map_at(first, handle)
        cuda.map_at(second, handle)
        write(first, b"kept")
        assert read(second) == b"kept"
        cuda.call("cuMemUnmap", first, UNIT_BYTES)
        cuda.map_at(first, other)
        assert read(first) == STALE * 4
        assert read(second) == b"kept"

    @pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
    def test_touching_it_otherwise_faults(self, simulator: Simulator, touch: str) -> None:
        child = elsewhere(f"print('ready', flush=True)\n{touch}\nprint('survived')")
        assert child.communicate()[0] == "ready\n"
        assert child.returncode == -signal.SIGSEGV

    def test_what_map_refuses(self, simulator: Simulator, cuda: Driven) -> None:
        block = cuda.block()
        handle = cuda.create()
        room = cuda.reserve(2 * UNIT_BYTES)
        for address, size, offset, number in [
            (block.address, UNIT_BYTES, 0, handle),
            (room + 1, UNIT_BYTES, 0, handle),
            (room, 2 * UNIT_BYTES, 0, handle),
            (room, UNIT_BYTES, UNIT_BYTES, handle),
            (room + 2 * UNIT_BYTES, UNIT_BYTES, 0, handle),
            (room, UNIT_BYTES, 0, 12345),
        ]:
            assert cuda.refusal("cuMemMap", address, size, offset, number, 0) == "INVALID_VALUE"
        assert simulator.violations() == {"unknown_handle": 1}
        assert len(simulator.mappings()) == 1
        cuda.call("cuMemMap", room + UNIT_BYTES, UNIT_BYTES, 0, handle, 0)

    def test_unmap_takes_whole_mappings(self, simulator: Simulator, cuda: Driven) -> None:
        at = cuda.reserve(3 * UNIT_BYTES)
        cuda.map_at(at, cuda.create(2 * UNIT_BYTES), 2 * UNIT_BYTES)
        for start, size in [(0, 1), (1, 1), (0, 3), (1, 2), (3, 1)]:
            refusal = cuda.refusal("cuMemUnmap", at + start * UNIT_BYTES, size * UNIT_BYTES)
            assert refusal == "INVALID_VALUE"
        assert cuda.refusal("cuMemAddressFree", at, 3 * UNIT_BYTES) == "INVALID_VALUE"
        assert read(at) == STALE * 4
        cuda.call("cuMemUnmap", at, 2 * UNIT_BYTES)
        assert simulator.violations() == {}
        cuda.call("cuMemUnmap", at, 2 * UNIT_BYTES)
        assert simulator.violations() == {"unmap_nothing": 1}
        assert cuda.refusal("cuMemAddressFree", at, UNIT_BYTES) == "INVALID_VALUE"
        cuda.call("cuMemAddressFree", at, 3 * UNIT_BYTES)
        assert simulator.reservations() == []

    def test_addresses_can_be_wished_for(self, cuda: Driven) -> None:
        at = cuda.reserve()
        assert int(cuda.call("cuMemAddressReserve", UNIT_BYTES, 0, at, 0)) != at
        cuda.call("cuMemAddressFree", at, UNIT_BYTES)
        assert int(cuda.call("cuMemAddressReserve", UNIT_BYTES, 0, at, 0)) == at
        aligned = int(cuda.call("cuMemAddressReserve", UNIT_BYTES, 64 * MIB, 0, 0))
        assert aligned % (64 * MIB) == 0
        assert cuda.refusal("cuMemAddressReserve", MIB, 0, 0, 0) == "INVALID_VALUE"

    def test_access_is_by_device_and_mapping(self, simulator: Simulator) -> None:
        simulator.set_devices(2)
        cuda = Driven(2)
        at = cuda.reserve(2 * UNIT_BYTES)
        for offset in (0, UNIT_BYTES):
            cuda.call("cuMemMap", at + offset, UNIT_BYTES, 0, cuda.create(), 0)
        access = [cuda.access(0), cuda.access(1, "READ")]
        cuda.call("cuMemSetAccess", at, 2 * UNIT_BYTES, access, 2)
        granted = [
            int(cuda.call("cuMemGetAccess", cuda.prop(device).location, at + UNIT_BYTES))
            for device in (0, 1)
        ]
        assert granted == [3, 1]
        assert simulator.mappings()[0].access[:3] == (3, 1, 0)
        assert cuda.refusal("cuMemSetAccess", at, MIB, access, 2) == "INVALID_VALUE"
        assert (
            cuda.refusal("cuMemSetAccess", at, UNIT_BYTES, [cuda.access(2)], 1) == "INVALID_DEVICE"
        )

    def test_plain_allocations(self, simulator: Simulator, cuda: Driven) -> None:
        before = cuda.free_bytes()
        at = int(cuda.call("cuMemAlloc", 1000))
        assert read(at) == STALE * 4
        assert cuda.free_bytes() == before - UNIT_BYTES
        assert cuda.refusal("cuMemUnmap", at, UNIT_BYTES) == "INVALID_VALUE"
        assert cuda.refusal("cuMemFree", at + 1) == "INVALID_VALUE"
        attribute = cuda.bindings.CUpointer_attribute
        kind = attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        start = attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
        assert int(cuda.call("cuPointerGetAttribute", kind, at + 5)) == 2
        assert int(cuda.call("cuPointerGetAttributes", 2, [kind, start], at + 5)[1]) == at
        cuda.call("cuMemFree", at)
        assert cuda.refusal("cuPointerGetAttribute", kind, at) == "INVALID_VALUE"
        assert cuda.free_bytes() == before
        assert simulator.violations() == {}


class TestHandles:
    def test_they_are_counted(self, simulator: Simulator, cuda: Driven) -> None:
        before = cuda.free_bytes()
        block = cuda.block()
        again = int(cuda.call("cuMemRetainAllocationHandle", block.address + 5))
        assert again == block.handle
        cuda.call("cuMemRelease", block.handle)
        cuda.call("cuMemRelease", block.handle)
        assert [handle.number for handle in simulator.handles()] == [block.handle]
        assert read(block.address) == STALE * 4
        cuda.call("cuMemUnmap", block.address, UNIT_BYTES)
        assert simulator.handles() == []
        assert cuda.free_bytes() == before
        assert cuda.refusal("cuMemRelease", block.handle) == "INVALID_VALUE"
        assert cuda.refusal("cuMemMap", block.address, UNIT_BYTES, 0, block.handle, 0) != "SUCCESS"
        (record,) = simulator.handles(live_only=False)
        assert (record.takes, record.releases, record.references) == (2, 3, 0)
        assert simulator.violations() == {"double_release": 1}

    @pytest.mark.parametrize("size", [0, MIB, UNIT_BYTES + 1])
    def test_their_size_is_a_multiple(self, cuda: Driven, size: int) -> None:
        assert cuda.refusal("cuMemCreate", size, cuda.prop(), 0) == "INVALID_VALUE"

    def test_granularity_is_the_devices(self, simulator: Simulator) -> None:
        simulator.set_devices(2)
        simulator.set_granularity_bytes(4 * MIB, device=1)
        cuda = Driven(2)
        least = cuda.bindings.CUmemAllocationGranularity_flags(0)
        for device, expected in enumerate((UNIT_BYTES, 4 * MIB)):
            prop = cuda.prop(device)
            assert cuda.call("cuMemGetAllocationGranularity", prop, least) == expected
        assert cuda.refusal("cuMemCreate", UNIT_BYTES, cuda.prop(1), 0) == "INVALID_VALUE"
        assert cuda.refusal("cuMemCreate", UNIT_BYTES, cuda.prop(2), 0) == "INVALID_DEVICE"


class TestBudget:
    def test_devices_fill_up_one_by_one(self, simulator: Simulator) -> None:
        simulator.set_devices(2)
        for device in (0, 1):
            simulator.set_total_bytes(2 * UNIT_BYTES, device)
        cuda = Driven(2)
        cuda.create(2 * UNIT_BYTES)
        assert cuda.refusal("cuMemCreate", UNIT_BYTES, cuda.prop(), 0) == "OUT_OF_MEMORY"
        assert cuda.refusal("cuMemAlloc", 1) == "OUT_OF_MEMORY"
        assert cuda.call("cuMemGetInfo") == (0, 2 * UNIT_BYTES)
        cuda.call("cuCtxSetCurrent", cuda.contexts[1])
        assert cuda.free_bytes() == 2 * UNIT_BYTES
        cuda.block(device=1)
        usage = simulator.device_usage(1)
        assert (usage.used_bytes, usage.live_handles, usage.live_mappings) == (UNIT_BYTES, 1, 1)
        assert simulator.device_usage(0).live_mappings == 0

    def test_it_moves(self, simulator: Simulator, cuda: Driven) -> None:
        handle = cuda.create()
        simulator.set_budget_bytes(UNIT_BYTES)
        assert cuda.free_bytes() == 0
        assert cuda.refusal("cuMemCreate", UNIT_BYTES, cuda.prop(), 0) == "OUT_OF_MEMORY"
        simulator.set_budget_bytes(0)
        cuda.call("cuMemRelease", handle)
        assert cuda.free_bytes() == 0
        simulator.set_budget_bytes(None)
        cuda.create()

    def test_processes_share_a_device(
        self, simulator: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "devices"
        monkeypatch.setenv("SIMULATED_CUDA_SHARED", str(path))
        monkeypatch.setenv("SIMULATED_CUDA_TOTAL_BYTES", str(4 * UNIT_BYTES))
        cuda = Driven()
        cuda.create()
        body = "cuda.create(2 * UNIT_BYTES); print(cuda.free_bytes(), flush=True); input()"
        other = elsewhere(body, shared=path, total_bytes=4 * UNIT_BYTES)
        assert other.stdout is not None
        assert int(other.stdout.readline()) == UNIT_BYTES
        shared = SharedDevices(path)
        assert shared.used_bytes() == {os.getpid(): UNIT_BYTES, other.pid: 2 * UNIT_BYTES}
        assert cuda.refusal("cuMemCreate", 2 * UNIT_BYTES, cuda.prop(), 0) == "OUT_OF_MEMORY"
        other.kill()
        other.communicate()
        assert cuda.free_bytes() == 3 * UNIT_BYTES
        shared.set_budget_bytes(2 * UNIT_BYTES)
        assert cuda.free_bytes() == UNIT_BYTES
        shared.take(UNIT_BYTES)
        assert cuda.refusal("cuMemCreate", UNIT_BYTES, cuda.prop(), 0) == "OUT_OF_MEMORY"
        shared.take(-UNIT_BYTES)
        cuda.create()
        simulator.reset()
        assert shared.used_bytes() in ({}, {os.getpid(): 0})
        shared.close()
