"""The simulated CUDA driver through the real bindings: modules and launches."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest

from sleepbackends.vmm.packing.layout import Layout
from tests.packing import contents, reference_pack
from tests.simulators.cuda import Simulator
from tests.simulators.cuda.driving import UNIT_BYTES, Driven, read, write

SPANS, SUMS = 0, 4096
"""Where the kernel's tables are in a block."""


@pytest.fixture
def module(cuda: Driven) -> Any:
    return cuda.call("cuModuleLoadData", b"any image")


def launch(
    cuda: Driven, function: Any, tables: int, count: int = 1, stream: Any = 0, **other: int
) -> tuple[Any, ...]:
    """What to call for a launch with two blocks a span, or with other values."""
    values = (tables + SPANS, count, 2, tables + SUMS)
    types = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p)
    grid, block, shared = (other.get(name, 0) for name in ("grid", "block", "shared"))
    shape = (grid or 2 * count, 1, 1, block or 256, 1, 1)
    return ("cuLaunchKernel", function, *shape, shared, stream, (values, types), 0)


def put(address: int, *words: int) -> None:
    write(address, b"".join(word.to_bytes(8, "little") for word in words))


def get(address: int, count: int) -> list[int]:
    return [int.from_bytes(read(address + 8 * i, 8), "little") for i in range(count)]


def sums_of(data: bytes) -> tuple[int, int]:
    """The function as it is written down, in plain Python."""
    s1 = s2 = 0
    for j in range(0, len(data), 8):
        w = int.from_bytes(data[j : j + 8], "little")
        u = (w ^ (j // 8 * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03)) % 2**64
        u = u * 0xBF58476D1CE4E5B9 % 2**64
        u = (u ^ u >> 32) * 0x94D049BB133111EB % 2**64
        s1, s2 = s1 + u, s2 + u % 2**32 * (u >> 32)
    return s1 % 2**64, s2 % 2**64


def test_it_adds_to_the_sums_of_each_span(cuda: Driven, module: Any) -> None:
    function = cuda.call("cuModuleGetFunction", module, b"fingerprint")
    tables, data = cuda.block().address, cuda.block(UNIT_BYTES).address
    contents = random.Random(1).randbytes(300_001)  # noqa: S311 - test data
    write(data, contents)
    put(tables + SPANS, data, len(contents), data + 3, 21, data, 0)
    put(tables + SUMS, 1, 2, 0, 0, 5, 6)
    cuda.call(*launch(cuda, function, tables, count=3))
    cuda.call("cuCtxSynchronize")
    (a1, a2), (b1, b2) = sums_of(contents), sums_of(contents[3:24])
    assert get(tables + SUMS, 6) == [(a1 + 1) % 2**64, (a2 + 2) % 2**64, b1, b2, 5, 6]


def carrying(
    cuda: Driven, function: Any, source: int, count: int, target: int, blocks: int = 1
) -> tuple[Any, ...]:
    values = (source, count, target)
    types = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p)
    return ("cuLaunchKernel", function, blocks, 1, 1, 256, 1, 1, 0, 0, (values, types), 0)


def test_rows_are_carried_between_a_device_and_pinned_memory(
    simulator: Simulator, cuda: Driven, module: Any
) -> None:
    function = cuda.call("cuModuleGetFunction", module, b"carry")
    device, host = cuda.block().address, int(cuda.call("cuMemHostAlloc", UNIT_BYTES, 0))
    contents = random.Random(1).randbytes(300 * 16)  # noqa: S311 - test data
    ctypes.memmove(host, contents, len(contents))
    write(device, bytes(UNIT_BYTES))
    cuda.call(*carrying(cuda, function, host, 299, device, blocks=2))
    cuda.call("cuCtxSynchronize")
    assert read(device, 300 * 16) == contents[: 299 * 16] + bytes(16)
    cuda.call(*carrying(cuda, function, device, 1, host + 16))
    cuda.call("cuCtxSynchronize")
    assert ctypes.string_at(host, 48) == contents[:16] * 2 + contents[32:48]
    for count, blocks in ((0, 0), (257, 1), (1, 2)):
        call = carrying(cuda, function, host, count, device, blocks=blocks)
        assert cuda.refusal(*call) == "INVALID_VALUE"
    cuda.call("cuMemFreeHost", host)
    pageable = ctypes.create_string_buffer(16)
    cuda.call(*carrying(cuda, function, ctypes.addressof(pageable), 1, device))
    assert cuda.refusal("cuCtxSynchronize") == "ILLEGAL_ADDRESS"
    assert simulator.violations() == {"queued_copy_faulted": 1}


def test_it_runs_in_the_order_of_its_stream(
    simulator: Simulator, cuda: Driven, module: Any
) -> None:
    function = cuda.call("cuModuleGetFunction", module, b"fingerprint")
    simulator.set_on_demand(True)
    simulator.set_copy_rate(1000)  # a kernel reads as fast as it can
    tables, data, stream = cuda.block().address, cuda.block().address, cuda.stream()
    put(tables + SPANS, data, UNIT_BYTES)
    put(tables + SUMS, 0, 0)
    cuda.call("cuMemsetD8Async", data, 7, UNIT_BYTES, stream)
    cuda.call(*launch(cuda, function, tables, stream=stream))
    cuda.call("cuMemsetD8Async", data, 8, UNIT_BYTES, stream)
    assert simulator.process_usage().queued_operations == 3
    assert get(tables + SUMS, 2) == [0, 0]
    cuda.call("cuStreamSynchronize", stream)
    assert get(tables + SUMS, 2) == list(sums_of(b"\7" * UNIT_BYTES))


def test_there_are_no_tables_for_nvrtc(cuda: Driven) -> None:
    assert cuda.refusal("cuGetExportTable", cuda.bindings.CUuuid()) == "NOT_FOUND"


def test_what_is_refused(simulator: Simulator, cuda: Driven, module: Any) -> None:
    assert cuda.refusal("cuModuleGetFunction", module, b"other") == "NOT_FOUND"
    assert cuda.refusal("cuModuleGetFunction", 1, b"fingerprint") == "INVALID_HANDLE"
    function, tables = cuda.call("cuModuleGetFunction", module, b"fingerprint"), cuda.reserve()
    for wrong in ({"grid": 3}, {"block": 128}, {"shared": 4}, {"count": 0, "grid": 1}):
        assert cuda.refusal(*launch(cuda, function, tables, **wrong)) == "INVALID_VALUE"
    assert cuda.refusal(*launch(cuda, function, tables, stream=12345)) == "INVALID_HANDLE"
    cuda.call("cuModuleUnload", module)
    assert cuda.refusal("cuModuleUnload", module) == "INVALID_HANDLE"
    assert cuda.refusal(*launch(cuda, function, tables)) == "INVALID_HANDLE"
    assert simulator.process_usage().queued_operations == 0


def test_memory_that_is_not_there_breaks_the_context(
    simulator: Simulator, cuda: Driven, module: Any
) -> None:
    function = cuda.call("cuModuleGetFunction", module, b"fingerprint")
    tables, block = cuda.block().address, cuda.block()
    put(tables + SPANS, block.address, UNIT_BYTES)
    cuda.drop(block)
    cuda.call(*launch(cuda, function, tables))
    assert cuda.refusal("cuCtxSynchronize") == "ILLEGAL_ADDRESS"
    assert simulator.violations() == {"queued_copy_faulted": 1}


def test_its_tables_are_in_use_while_it_is_queued(
    simulator: Simulator, cuda: Driven, module: Any
) -> None:
    function = cuda.call("cuModuleGetFunction", module, b"fingerprint")
    simulator.set_on_demand(True)
    tables = cuda.block()
    put(tables.address + SPANS, tables.address, 8)
    cuda.call(*launch(cuda, function, tables.address))
    cuda.call("cuModuleUnload", module)
    cuda.call("cuMemUnmap", tables.address, UNIT_BYTES)
    assert simulator.violations() == {"unload_in_use": 1, "unmap_in_use": 1}


def test_a_kernel_can_be_made_to_fail(simulator: Simulator, cuda: Driven, module: Any) -> None:
    function = cuda.call("cuModuleGetFunction", module, b"fingerprint")
    tables = cuda.block().address
    put(tables + SPANS, tables, 8)
    simulator.fail("queuedKernel", cuda.error("LAUNCH_FAILED"))
    cuda.call(*launch(cuda, function, tables))
    assert cuda.refusal("cuCtxSynchronize") == "LAUNCH_FAILED"
    assert simulator.calls("queuedKernel") == 1


def test_modules_are_counted_until_they_or_their_context_end(
    simulator: Simulator, cuda: Driven, module: Any
) -> None:
    cuda.call("cuModuleLoadDataEx", b"any image", 0, [], [])
    assert simulator.process_usage().live_modules == 2
    cuda.call("cuModuleUnload", module)
    assert simulator.process_usage().live_modules == 1
    cuda.call("cuDevicePrimaryCtxRelease", 0)
    assert simulator.process_usage().live_modules == 0


class TestPacking:
    """What the kernels of packing take; what they make of it is tested where they are used."""

    SIZE, TILES, ROOM = 20_000, 3, 16_000
    LAYOUT = Layout(2, 3, 118)

    @pytest.fixture
    def at(self, cuda: Driven) -> int:
        return cuda.block().address

    def launch(self, cuda: Driven, module: Any, name: str, **other: int) -> tuple[Any, ...]:
        """What to call for a launch over the start of a block, packed behind it."""
        at = other["at"]
        data, packed = (at, self.SIZE), at + UNIT_BYTES // 2
        code, room = other.get("code", self.LAYOUT.code), other.get("room", self.ROOM)
        values: tuple[int, ...] = (*data, code, packed, room)
        p, n, w = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint
        types: tuple[Any, ...] = (p, n, w, p, n)
        if name == "tally":
            values, types = values[:-1], types[:-1]
        elif name == "unpack":
            values, types = (packed, room, *data), (p, n, p, n)
        grid = other.get("grid", 1 if name == "prefix" else self.TILES)
        function = cuda.call("cuModuleGetFunction", module, name.encode())
        shape = (grid, 1, 1, other.get("block", 512), 1, 1)
        return ("cuLaunchKernel", function, *shape, 0, 0, (values, types), 0)

    def test_each_does_its_part(self, cuda: Driven, module: Any, at: int) -> None:
        data = contents("outliers", self.SIZE, 1)
        expected = reference_pack(data, 2, 3, 118)
        write(at, data)
        for name in ("tally", "prefix", "pack"):
            cuda.call(*self.launch(cuda, module, name, at=at))
        cuda.call("cuCtxSynchronize")
        assert read(at + UNIT_BYTES // 2, len(expected)) == expected
        write(at, bytes(self.SIZE))
        cuda.call(*self.launch(cuda, module, "unpack", at=at))
        cuda.call("cuCtxSynchronize")
        assert read(at, self.SIZE) == data

    def test_one_that_is_left_out_is_missed(self, cuda: Driven, module: Any, at: int) -> None:
        data = contents("outliers", self.SIZE, 1)
        expected = reference_pack(data, 2, 3, 118)
        write(at, data)
        for missing in ("tally", "prefix", "pack"):
            write(at + UNIT_BYTES // 2, b"\1" * self.ROOM)
            for name in ("tally", "prefix", "pack"):
                if name != missing:
                    cuda.call(*self.launch(cuda, module, name, at=at))
            cuda.call("cuCtxSynchronize")
            assert read(at + UNIT_BYTES // 2, len(expected)) != expected

    @pytest.mark.parametrize("name", ["tally", "prefix", "pack", "unpack"])
    def test_what_is_refused(
        self, simulator: Simulator, cuda: Driven, module: Any, at: int, name: str
    ) -> None:
        wrong: list[dict[str, int]] = [{"grid": 4}, {"grid": 2}, {"block": 256}, {"at": at + 8}]
        if name == "unpack":
            wrong.append({"room": 31})
        else:
            wrong.append({"code": 0})
        if name in ("prefix", "pack"):
            wrong.append({"room": self.LAYOUT.packed_bytes(self.SIZE, 0) - 1})
        for each in wrong:
            call = self.launch(cuda, module, name, **{"at": at, **each})
            assert cuda.refusal(*call) == "INVALID_VALUE", each
        assert simulator.process_usage().queued_operations == 0

    @pytest.mark.parametrize("name", ["tally", "prefix", "pack", "unpack"])
    def test_memory_that_is_not_there_breaks_the_context(
        self, simulator: Simulator, cuda: Driven, module: Any, name: str
    ) -> None:
        cuda.call(*self.launch(cuda, module, name, at=cuda.reserve()))
        assert cuda.refusal("cuCtxSynchronize") == "ILLEGAL_ADDRESS"
        assert simulator.violations() == {"queued_copy_faulted": 1}

    @pytest.mark.parametrize("name", ["survey", "count"])
    def test_rows_are_of_memory_that_is_there(
        self, simulator: Simulator, cuda: Driven, module: Any, name: str
    ) -> None:
        rows = cuda.block().address
        put(rows, cuda.reserve(), 4096 | self.LAYOUT.code >> 8 << 40)
        p, w = ctypes.c_void_p, ctypes.c_uint
        values = [rows, 1, rows + 64]
        types: list[Any] = [p, w, p]
        if name == "count":
            values, types = [rows, 1, 1, rows + 64], [p, w, w, p]
        function = cuda.call("cuModuleGetFunction", module, name.encode())
        shape = (1, 1, 1, 512, 1, 1)
        wrong = (1, 1, 1, 256, 1, 1)
        launch, rest = ("cuLaunchKernel", function), (0, 0, (tuple(values), tuple(types)), 0)
        assert cuda.refusal(*launch, *wrong, *rest) == "INVALID_VALUE"
        cuda.call(*launch, *shape, *rest)
        assert cuda.refusal("cuCtxSynchronize") == "ILLEGAL_ADDRESS"
        assert simulator.violations() == {"queued_copy_faulted": 1}
