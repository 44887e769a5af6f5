"""Where fingerprints cannot be had, or fail: nothing is taken for clean, and nothing is left."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from sleepbackends.cumem import fingerprint as module
from sleepbackends.cumem import nvrtc
from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.cumem.images import Images
from sleepbackends.errors import MechanismError, SleepBackendsError, UnsupportedOperationError
from sleepbackends.vmm.fingerprint import Span
from tests.cumem.hashed import CUTS, Memory, expected, memory
from tests.native.fixtures import ARCHITECTURE
from tests.simulators.cuda import Simulator

__all__ = ["memory"]

REFUSED, NO_ROOM, LOST = 1, 2, 700
CALLS = [
    *("cuDeviceGetAttribute", "cuModuleLoadData", "cuModuleGetFunction", "cuStreamCreate"),
    *("cuMemAlloc", "cuMemHostAlloc", "cuMemsetD8Async", "cuLaunchKernel"),
    *("cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuDeviceGet", "cuCtxSetCurrent"),
]


@pytest.mark.parametrize("times", [1, None])
@pytest.mark.parametrize("error", [REFUSED, NO_ROOM])
@pytest.mark.parametrize("function", CALLS)
def test_faults_at_every_call(
    simulator: Simulator, memory: Memory, function: str, error: int, times: int | None
) -> None:
    """Nothing is taken for clean, nothing leaks, and once the fault is gone all is well."""
    fired = False
    for nth in range(1, 40):
        before = simulator.calls(function)
        simulator.fail(function, error, nth, times)
        try:
            pending = memory.queue()
            found = None if pending is None else pending.result()
            assert found in (None, expected())
        except SleepBackendsError as caught:
            assert pending is not None, "only the result raises"
            assert isinstance(caught, MechanismError) or error == NO_ROOM
        reached = simulator.calls(function) - before >= nth
        fired |= reached
        simulator.clear_faults()
        memory.driver.close()
        assert memory.queued([(0, 9)]).result() == expected([(0, 9)])
        memory.driver.close()
        if not reached:
            assert fired, "this test measures nothing"
            return
    pytest.fail(f"{function} is called more often than this test expects")


def test_a_kernel_that_fails_ends_the_context(simulator: Simulator) -> None:
    driver = CudaDriver()
    memory = Memory(driver)
    simulator.set_on_demand(True)  # else it may fail before all is queued, and there are none
    simulator.fail("queuedKernel", LOST)
    pending = memory.queued()
    for _ in range(2):
        with pytest.raises(MechanismError, match="hashing failed") as caught:
            pending.result()
        assert not caught.value.recoverable
    assert memory.queue() is None


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: int) -> Any:
        raise UnsupportedOperationError("torch is not installed")

    monkeypatch.setattr(module, "TorchFingerprints", missing)


@pytest.mark.usefixtures("no_torch", "no_fingerprints")
def test_without_nvrtc_and_torch_there_are_none(
    simulator: Simulator, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, module.__name__):
        for _ in range(3):
            assert memory.queue() is None
        assert not memory.driver.fingerprints.prepare(0, 1)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "no NVRTC" in record.message
    assert "torch is not installed" in record.message
    assert simulator.calls("cuModuleLoadData") == simulator.calls("cuStreamCreate") == 0


@pytest.mark.usefixtures("no_fingerprints")
def test_torch_takes_over(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    class Torch:
        def __init__(self, device: int) -> None:
            self.device = device

        def queue(self, spans: Sequence[Span]) -> None:
            asked.append((self.device, spans))

        def close(self) -> None:
            asked.append((self.device, []))

    monkeypatch.setattr(module, "TorchFingerprints", Torch)
    with caplog.at_level(logging.INFO, module.__name__):
        memory.queue(CUTS)
        memory.queue(CUTS)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "torch computes the fingerprints of device 0, slower"
    ]
    memory.driver.close()
    assert asked == [(0, memory.spans()), (0, memory.spans()), (0, [])]


def test_an_image_that_does_not_load_is_compiled_again(
    simulator: Simulator,
    memory: Memory,
    kernel_images: Images,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvrtc, "version", lambda: "99.9")
    monkeypatch.setattr(nvrtc, "compile_for", lambda source, architecture: b"a new image")
    kernel_images.keep(b"an old image", ARCHITECTURE, "99.9")
    simulator.fail("cuModuleLoadData", 200)
    assert memory.queued().result() == expected()
    assert kernel_images.cached(ARCHITECTURE) == b"a new image"
    memory.driver.close()
    simulator.fail("cuModuleLoadData", 200, times=2)
    assert memory.queue() is None


@pytest.mark.usefixtures("no_torch")
def test_no_room_now_is_no_reason_for_later(simulator: Simulator, memory: Memory) -> None:
    simulator.fail("cuModuleLoadData", NO_ROOM)
    assert memory.queue() is None
    assert memory.queued().result() == expected()


def test_a_source_that_is_missing(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, no_torch: None
) -> None:
    def missing() -> Any:
        raise FileNotFoundError("fingerprint.cu")

    monkeypatch.setattr(module, "kernel_source", missing)
    assert memory.queue() is None
