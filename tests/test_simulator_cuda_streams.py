"""The simulated CUDA driver through the real bindings: deferred work, events, threads."""

from __future__ import annotations

import ctypes
import subprocess
import threading
import time
from typing import Any

import pytest

from tests.simulators.cuda import (
    Sanitizer,
    Simulator,
    build_exerciser,
    find_compiler,
)
from tests.simulators.cuda.driving import (
    MIB,
    UNIT_BYTES,
    Driven,
    HostBuffer,
    read,
)

STALE = 0xD7


def wait_until(met: Any) -> None:
    deadline = time.monotonic() + 5
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class TestDeferral:
    def test_a_copy_lands_when_waited_for(
        self, simulator: Simulator, cuda: Driven, pinned: HostBuffer
    ) -> None:
        simulator.set_on_demand(True)
        stream, at = cuda.stream(), cuda.block().address
        cuda.call("cuMemcpyDtoHAsync", pinned.address, at, UNIT_BYTES, stream)
        assert pinned.is_all(5)
        assert simulator.process_usage().queued_operations == 1
        cuda.call("cuStreamSynchronize", stream)
        assert pinned.is_all(STALE)

    def test_it_takes_its_time(
        self, simulator: Simulator, cuda: Driven, pinned: HostBuffer
    ) -> None:
        simulator.set_copy_rate(40 * MIB)
        stream, at = cuda.stream(), cuda.block().address
        started = time.monotonic()
        cuda.call("cuMemcpyHtoDAsync", at, pinned.address, UNIT_BYTES, stream)
        assert cuda.refusal("cuStreamQuery", stream) == "NOT_READY"
        wait_until(lambda: cuda.refusal("cuStreamQuery", stream) == "SUCCESS")
        assert time.monotonic() - started >= 2 / 40

    def test_unmapping_too_early_breaks_the_context(
        self, simulator: Simulator, cuda: Driven, pinned: HostBuffer
    ) -> None:
        simulator.set_on_demand(True)
        stream, block = cuda.stream(), cuda.block()
        cuda.call("cuMemcpyDtoHAsync", pinned.address, block.address, UNIT_BYTES, stream)
        cuda.call("cuMemUnmap", block.address, UNIT_BYTES)
        assert simulator.violations() == {"unmap_in_use": 1}
        assert cuda.refusal("cuStreamSynchronize", stream) == "ILLEGAL_ADDRESS"
        assert simulator.violations() == {"unmap_in_use": 1, "queued_copy_faulted": 1}
        assert cuda.refusal("cuMemGetInfo") == "ILLEGAL_ADDRESS"

    def test_so_does_withdrawing_access(
        self, simulator: Simulator, cuda: Driven, pinned: HostBuffer
    ) -> None:
        simulator.set_on_demand(True)
        block = cuda.block()
        cuda.call("cuMemcpyDtoHAsync", pinned.address, block.address, 4, 0)
        cuda.call("cuMemSetAccess", block.address, UNIT_BYTES, [cuda.access(0, "NONE")], 1)
        assert cuda.refusal("cuCtxSynchronize") == "ILLEGAL_ADDRESS"
        assert simulator.violations() == {"queued_copy_faulted": 1}

    def test_unmapping_while_it_runs_does_too(
        self, simulator: Simulator, cuda: Driven, pinned: HostBuffer
    ) -> None:
        simulator.set_copy_rate(20 * MIB)
        block = cuda.block()
        cuda.call("cuMemcpyHtoDAsync", block.address, pinned.address, UNIT_BYTES, cuda.stream())
        wait_until(lambda: read(block.address) == b"\5" * 4)
        cuda.drop(block)
        assert cuda.refusal("cuCtxSynchronize") == "ILLEGAL_ADDRESS"
        assert simulator.handles() == []
        assert simulator.violations() == {"unmap_in_use": 1, "queued_copy_faulted": 1}

    def test_a_copy_can_be_made_to_fail(
        self, simulator: Simulator, cuda: Driven, pinned: HostBuffer
    ) -> None:
        simulator.set_on_demand(True)
        simulator.fail("queuedCopy", cuda.error("ECC_UNCORRECTABLE"))
        at = cuda.block().address
        for offset in (0, 8):
            cuda.call("cuMemcpyHtoDAsync", at + offset, pinned.address, 4, 0)
        assert cuda.refusal("cuCtxSynchronize") == "ECC_UNCORRECTABLE"
        assert read(at, 12) == bytes([STALE]) * 12

    def test_the_default_stream_keeps_order(
        self, simulator: Simulator, cuda: Driven, pinned: HostBuffer
    ) -> None:
        simulator.set_on_demand(True)
        at, blocking, free = cuda.block().address, cuda.stream(blocking=True), cuda.stream()
        cuda.call("cuMemsetD8Async", at, 1, 1, blocking)
        cuda.call("cuMemsetD8Async", at + 1, 1, 1, free)
        cuda.call("cuMemcpyDtoH", pinned.address, at, 2)
        assert read(pinned.address, 2) == bytes([1, STALE])
        cuda.call("cuMemsetD8", at, 2, 1)
        cuda.call("cuMemsetD8Async", at + 1, 3, 1, blocking)
        cuda.call("cuStreamSynchronize", blocking)
        assert read(at, 2) == b"\2\3"

    def test_a_destroyed_stream_finishes(
        self, simulator: Simulator, cuda: Driven, pinned: HostBuffer
    ) -> None:
        simulator.set_on_demand(True)
        at, stream = cuda.block().address, cuda.stream()
        cuda.call("cuMemcpyHtoDAsync", at, pinned.address, 4, stream)
        cuda.call("cuStreamDestroy", stream)
        assert cuda.refusal("cuStreamSynchronize", stream) == "INVALID_HANDLE"
        wait_until(lambda: read(at) == b"\5" * 4)


class TestEvents:
    def test_they_order_streams(
        self, simulator: Simulator, cuda: Driven, pinned: HostBuffer
    ) -> None:
        simulator.set_on_demand(True)
        at, first, second = cuda.block().address, cuda.stream(), cuda.stream()
        event = cuda.call("cuEventCreate", 0)
        cuda.call("cuEventQuery", event)
        cuda.call("cuMemcpyHtoDAsync", at, pinned.address, 4, first)
        cuda.call("cuEventRecord", event, first)
        cuda.call("cuStreamWaitEvent", second, event, 0)
        cuda.call("cuMemcpyDtoDAsync", at + 8, at, 4, second)
        cuda.call("cuStreamSynchronize", second)
        assert read(at + 8) == b"\5" * 4
        cuda.call("cuEventQuery", event)
        cuda.call("cuEventRecord", event, first)
        assert cuda.refusal("cuEventQuery", event) == "NOT_READY"
        wait_until(lambda: cuda.refusal("cuEventQuery", event) == "SUCCESS")
        cuda.call("cuEventDestroy", event)
        assert cuda.refusal("cuEventQuery", event) == "INVALID_HANDLE"

    def test_they_measure_time(
        self, simulator: Simulator, cuda: Driven, pinned: HostBuffer
    ) -> None:
        simulator.set_copy_rate(100 * MIB)
        start, end = (cuda.call("cuEventCreate", 0) for _ in range(2))
        assert cuda.refusal("cuEventElapsedTime", start, end) == "INVALID_HANDLE"
        cuda.call("cuEventRecord", start, 0)
        cuda.call("cuMemcpyHtoDAsync", cuda.block().address, pinned.address, UNIT_BYTES, 0)
        cuda.call("cuEventRecord", end, 0)
        assert cuda.refusal("cuEventElapsedTime", start, end) == "NOT_READY"
        cuda.call("cuEventSynchronize", end)
        assert 19 <= cuda.call("cuEventElapsedTime", start, end) < 2000

    def test_host_functions_run_in_turn_and_may_not_call(
        self, simulator: Simulator, cuda: Driven
    ) -> None:
        found: list[Any] = []

        def function(_: int) -> None:
            found.extend((threading.get_ident(), cuda.refusal("cuMemGetInfo")))

        # Python code on the worker while this thread waits: so the bindings let go of the GIL.
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        host_function = cuda.bindings.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value)
        cuda.call("cuLaunchHostFunc", 0, host_function, 0)
        cuda.call("cuCtxSynchronize")
        assert found[0] != threading.get_ident()
        assert found[1] == "NOT_PERMITTED"
        assert simulator.violations() == {"call_in_callback": 1}


class TestThreads:
    def test_many_at_once(self, simulator: Simulator) -> None:
        simulator.set_devices(2)
        cuda = Driven(2)
        failures: list[BaseException] = []

        def use(number: int) -> None:
            try:
                cuda.call("cuCtxSetCurrent", cuda.contexts[number % 2])
                stream, buffer = cuda.stream(), HostBuffer(byte=number)
                cuda.call("cuMemHostRegister", buffer.address, UNIT_BYTES, 0)
                for _ in range(5):
                    block = cuda.block(device=number % 2)
                    arguments = (block.address, buffer.address, UNIT_BYTES, stream)
                    cuda.call("cuMemcpyHtoDAsync", *arguments)
                    cuda.call("cuStreamSynchronize", stream)
                    assert read(block.address, UNIT_BYTES) == bytes([number]) * UNIT_BYTES
                    cuda.drop(block)
                cuda.call("cuMemHostUnregister", buffer.address)
            except BaseException as error:  # noqa: BLE001 - shown by the test below
                failures.append(error)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert simulator.violations() == {}
        assert simulator.handles() == []
        assert simulator.process_usage().pinned_bytes == 0

    @pytest.mark.parametrize("sanitizer", ["address", "thread"])
    def test_checkers_find_nothing(self, sanitizer: Sanitizer) -> None:
        if find_compiler() is None:
            pytest.skip("the simulated CUDA driver needs a C compiler")
        try:
            program = build_exerciser(sanitizer=sanitizer)
        except RuntimeError as error:
            if "san" not in str(error).rpartition("cannot find")[2]:
                raise
            pytest.skip(f"the compiler has no {sanitizer} sanitizer")
        result = subprocess.run([program], capture_output=True, text=True, check=False)
        if "unexpected memory mapping" in result.stderr:
            pytest.skip("the kernel places memory where the thread sanitizer cannot watch it")
        assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
