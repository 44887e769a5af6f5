"""The simulated CUDA driver through the real bindings: copies and host memory."""

from __future__ import annotations

from typing import Any

from tests.simulators.cuda import (
    Simulator,
)
from tests.simulators.cuda.driving import (
    MIB,
    UNIT_BYTES,
    Driven,
    HostBuffer,
    elsewhere,
    read,
    write,
)

STALE = 0xD7


class TestCopies:
    def test_there_and_back_over_several_mappings(self, cuda: Driven) -> None:
        at = cuda.reserve(2 * UNIT_BYTES)
        for offset in (0, UNIT_BYTES):
            cuda.map_at(at + offset, cuda.create())
        source, target = HostBuffer(2 * MIB, byte=1), HostBuffer(2 * MIB)
        cuda.call("cuMemcpyHtoD", at + MIB, source.address, 2 * MIB)
        assert read(at + MIB - 1, 2) == bytes([STALE, 1])
        assert read(at + 3 * MIB - 1, 2) == bytes([1, STALE])
        cuda.call("cuMemcpyDtoH", target.address, at + MIB, 2 * MIB)
        assert target.is_all(1)
        other = cuda.block()
        cuda.call("cuMemcpyDtoD", other.address, at + MIB, UNIT_BYTES)
        cuda.call("cuCtxSynchronize")
        assert read(other.address, UNIT_BYTES) == b"\1" * UNIT_BYTES

    def test_fills(self, cuda: Driven) -> None:
        at, stream = cuda.block().address, cuda.stream()
        cuda.call("cuMemsetD8", at, 7, MIB)
        cuda.call("cuMemsetD32", at + MIB, 0x04030201, 2)
        cuda.call("cuCtxSynchronize")
        cuda.call("cuMemsetD8Async", at + 1, 8, 1, stream)
        cuda.call("cuMemsetD32Async", at + MIB + 4, 0, 1, stream)
        cuda.call("cuStreamSynchronize", stream)
        assert read(at, 3) == b"\7\x08\7"
        assert read(at + MIB - 1, 10) == bytes([7, 1, 2, 3, 4, 0, 0, 0, 0, STALE])
        assert cuda.refusal("cuMemsetD32", at + 1, 0, 1) == "INVALID_VALUE"

    def test_ranges_are_checked(self, cuda: Driven, pinned: HostBuffer) -> None:
        block, shut = cuda.block(), cuda.reserve()
        cuda.call("cuMemMap", shut, UNIT_BYTES, 0, cuda.create(), 0)
        device, host = block.address, pinned.address
        for to, size in [(cuda.reserve(), 1), (shut, 1), (device + 1, UNIT_BYTES), (1, 1)]:
            for call in ("cuMemcpyHtoD", "cuMemcpyHtoDAsync"):
                stream = (0,) * call.endswith("Async")
                assert cuda.refusal(call, to, host, size, *stream) == "INVALID_VALUE"
        for function, arguments in [
            ("cuMemcpyDtoH", (host, shut, 1)),
            ("cuMemcpyHtoD", (device, device + 8, 1)),
            ("cuMemcpyDtoH", (device + 8, device, 1)),
            ("cuMemcpyAsync", (device, host + 1, UNIT_BYTES, 0)),
            ("cuMemcpyAsync", (device, shut, 1, 0)),
            ("cuMemsetD8", (host, 0, 1)),
        ]:
            assert cuda.refusal(function, *arguments) == "INVALID_VALUE"
        cuda.call("cuMemcpyAsync", device, host, UNIT_BYTES, 0)
        cuda.call("cuCtxSynchronize")
        assert read(device) == b"\5" * 4

    def test_batches_run_in_any_order(
        self, simulator: Simulator, cuda: Driven, pinned: HostBuffer
    ) -> None:
        simulator.set_on_demand(True)
        stream, at = cuda.stream(), cuda.block().address
        plain, during = (cuda.bindings.CUmemcpyAttributes() for _ in range(2))
        order = cuda.bindings.CUmemcpySrcAccessOrder
        plain.srcAccessOrder = order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        during.srcAccessOrder = order.CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL
        to, sources = [at, at + 8, at + 16], [pinned.address + i * MIB // 2 for i in range(3)]

        def batch(sizes: list[int], starts: list[int], on: Any) -> str:
            ends = [[cuda.bindings.CUdeviceptr(end) for end in side] for side in (to, sources)]
            arguments = (*ends, sizes, 3, [plain, during], starts, 2, on)
            return cuda.refusal("cuMemcpyBatchAsync", *arguments)

        for sizes, starts, on in [([4, 4, 4], [0, 2], 0), ([4, 0, 4], [0, 2], stream)] + [
            ([4, 4, 4], wrong, stream) for wrong in ([1, 2], [0, 3], [0, 0])
        ]:
            assert batch(sizes, starts, on) == "INVALID_VALUE"
        assert batch([4, 4, 4], [0, 2], stream) == "SUCCESS"
        pinned.fill(6)
        assert read(at, 24) == bytes([STALE]) * 24
        cuda.call("cuStreamSynchronize", stream)
        assert read(at, 24) == b"".join(bytes([b] * 4 + [STALE] * 4) for b in (6, 6, 5))
        to[2] = at
        batch([8, 8, 8], [0, 2], stream)
        cuda.call("cuStreamSynchronize", stream)
        assert read(at, 8) == b"\6" * 8


class TestHostMemory:
    def test_registration_is_kept_exactly(self, simulator: Simulator, cuda: Driven) -> None:
        buffer = HostBuffer()
        at = buffer.address
        cuda.call("cuMemHostRegister", at, MIB, 0)
        again = cuda.refusal("cuMemHostRegister", at + MIB - 1, MIB, 0)
        assert again == "HOST_MEMORY_ALREADY_REGISTERED"
        assert cuda.refusal("cuMemHostUnregister", at + 1) == "HOST_MEMORY_NOT_REGISTERED"
        assert cuda.refusal("cuMemFreeHost", at) == "INVALID_VALUE"
        assert cuda.refusal("cuMemHostRegister", cuda.reserve(), 4096, 0) == "INVALID_VALUE"
        assert cuda.refusal("cuMemHostRegister", 4096, 4096, 0) == "INVALID_VALUE"
        assert int(cuda.call("cuMemHostGetDevicePointer", at + 8, 0)) == at + 8
        assert [(r.address, r.size_bytes) for r in simulator.pinned_ranges()] == [(at, MIB)]
        cuda.call("cuMemHostUnregister", at)
        assert simulator.process_usage().pinned_bytes == 0

    def test_pinning_has_a_limit(self, simulator: Simulator, cuda: Driven) -> None:
        simulator.set_pinned_limit_bytes(MIB)
        buffer = HostBuffer()
        assert cuda.refusal("cuMemHostRegister", buffer.address, MIB + 1, 0) == "OUT_OF_MEMORY"
        own = int(cuda.call("cuMemHostAlloc", MIB, 0))
        write(own, b"mine")
        assert cuda.refusal("cuMemHostAlloc", 1, 0) == "OUT_OF_MEMORY"
        cuda.call("cuMemFreeHost", own)
        cuda.call("cuMemHostRegister", buffer.address, MIB, 0)

    def test_taking_it_too_early_is_noticed(
        self, simulator: Simulator, cuda: Driven, pinned: HostBuffer
    ) -> None:
        simulator.set_on_demand(True)
        cuda.call("cuMemcpyHtoDAsync", cuda.block().address, pinned.address, 4, 0)
        cuda.call("cuMemHostUnregister", pinned.address)
        assert simulator.violations() == {"host_released_in_use": 1}

    def test_host_memory_that_is_gone(self, simulator: Simulator) -> None:
        body = """
size = 16 * MIB
buffer = ctypes.CDLL(None)
buffer.mmap.restype = ctypes.c_void_p
at = buffer.mmap(None, ctypes.c_size_t(size), 3, 0x22, -1, ctypes.c_long(0))
cuda.call("cuMemHostRegister", at, size, 0)
sim = Simulator(build())
sim.set_on_demand(True)
cuda.call("cuMemcpyHtoDAsync", cuda.block(size).address, at, size, 0)
buffer.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size))
print(cuda.refusal("cuCtxSynchronize"), sim.violations())
"""
        child = elsewhere(f"from tests.simulators.cuda import Simulator\n{body}")
        assert child.communicate()[0] == "ILLEGAL_ADDRESS {'host_bytes_gone': 1}\n"

    def test_pageable_memory_is_taken_at_the_call(self, simulator: Simulator, cuda: Driven) -> None:
        simulator.set_on_demand(True)
        at, stream, buffer = cuda.block().address, cuda.stream(), HostBuffer(byte=1)
        cuda.call("cuMemcpyHtoDAsync", at, buffer.address, UNIT_BYTES, stream)
        buffer.fill(2)
        assert read(at) == bytes([STALE]) * 4
        cuda.call("cuMemcpyDtoHAsync", buffer.address, at, UNIT_BYTES, stream)
        assert buffer.is_all(1)
        assert simulator.process_usage().pageable_copy_bytes == 2 * UNIT_BYTES
