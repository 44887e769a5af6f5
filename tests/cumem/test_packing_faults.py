"""Where packing cannot be had, or fails: there is none, or a typed error, and nothing is left."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from sleepbackends.cumem import nvrtc
from sleepbackends.cumem import packing as module
from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.cumem.images import Images
from sleepbackends.errors import DeviceMemoryError, MechanismError
from sleepbackends.vmm import address_space
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.packing.layout import Layout
from tests.cumem.packed import SLOT_BYTES, Device, device, driver, escapes, packed
from tests.native.fixtures import ARCHITECTURE
from tests.packing import contents
from tests.simulators.cuda import Simulator

__all__ = ["device", "driver"]

REFUSED, NO_ROOM, LOST = 1, 2, 700
CALLS = [
    *("cuDeviceGetAttribute", "cuModuleLoadData", "cuModuleGetFunction", "cuStreamCreate"),
    *("cuMemAlloc", "cuMemHostAlloc", "cuMemsetD8Async", "cuLaunchKernel", "cuDeviceGet"),
    *("cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuCtxSetCurrent"),
    *("cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuMemCreate", "cuMemMap"),
    *("cuMemSetAccess", "cuStreamWaitEvent", "cuStreamSynchronize"),
]
LAYOUT = Layout(2, 3, 118)
DATA = contents("weights", 20_000, 1)
PACKED = packed(DATA, LAYOUT)


def use(driver: CudaDriver) -> bool:
    """Everything once; False where there is no packing."""
    packing = driver.packing(0)
    if packing is None:
        return False
    lane = driver.lane(0, "pack")
    slots = packing.slots(2, SLOT_BYTES)
    try:
        address, target = slots.addresses
        driver.write(address, DATA, 0)
        span = Span(address, len(DATA))
        (choice,) = packing.survey([span]).result()
        assert choice is not None
        assert packing.count([span], [LAYOUT]).result() == [escapes(DATA, LAYOUT)]
        lane.wait_for(driver.lane(0, "hash").event())
        packing.pack(lane, span, LAYOUT, target, len(PACKED))
        lane.fill(address, len(DATA), 0)
        packing.unpack(lane, Span(target, len(PACKED)), span)
        lane.wait()
        assert driver.read(target, len(PACKED), 0) == PACKED
        assert driver.read(address, len(DATA), 0) == DATA
    finally:
        driver.synchronize(0)
        slots.close()
    return True


@pytest.mark.parametrize("times", [1, None])
@pytest.mark.parametrize("error", [REFUSED, NO_ROOM])
@pytest.mark.parametrize("function", CALLS)
def test_faults_at_every_call(
    simulator: Simulator, driver: CudaDriver, function: str, error: int, times: int | None
) -> None:
    fired = False
    for nth in range(1, 60):
        before, reserved = simulator.calls(function), simulator.process_usage().reserved_bytes
        simulator.fail(function, error, nth, times)
        try:
            use(driver)
        except (MechanismError, DeviceMemoryError) as caught:
            assert isinstance(caught, MechanismError) or error == NO_ROOM
        reached = simulator.calls(function) - before >= nth
        fired |= reached
        simulator.clear_faults()
        driver.close()
        usage = simulator.process_usage()
        assert usage.reserved_bytes == reserved
        assert usage.live_modules == usage.live_streams == usage.pinned_bytes == 0
        assert simulator.device_usage(0).live_handles == 0
        if not reached:
            assert fired, "this test measures nothing"
            assert use(driver)
            return
    pytest.fail(f"{function} is called more often than this test expects")


@pytest.mark.parametrize("function", ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"])
def test_memory_that_the_driver_keeps_is_told_of(
    simulator: Simulator, function: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(CudaDriver())
    simulator.fail(function, REFUSED)
    device.slots.close()
    assert {record.message for record in caplog.records} == {"memory of device 0 stays"}
    device.driver.close()
    simulator.reset()


def test_slots_that_were_never_taken_do_not_stay(
    simulator: Simulator, driver: CudaDriver, caplog: pytest.LogCaptureFixture
) -> None:
    packing = driver.packing(0)
    assert packing is not None
    simulator.fail("cuCtxGetCurrent", REFUSED, times=None)
    with pytest.raises(MechanismError):
        packing.slots(2, SLOT_BYTES)
    assert caplog.records == []


def test_a_kernel_that_fails_ends_the_context(simulator: Simulator) -> None:
    device = Device(CudaDriver())
    span = device.put(DATA)
    simulator.set_on_demand(True)
    simulator.fail("queuedKernel", LOST)
    pending = device.packing.survey([span])
    for _ in range(2):
        with pytest.raises(MechanismError, match="hashing failed") as caught:
            pending.result()
        assert not caught.value.recoverable
    with pytest.raises(MechanismError):
        device.packing.count([span], [LAYOUT])
    simulator.reset()


@pytest.mark.usefixtures("no_fingerprints")
def test_without_nvrtc_there_is_none(
    simulator: Simulator, driver: CudaDriver, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, module.__name__):
        for _ in range(3):
            assert driver.packing(0) is None
    (record,) = caplog.records
    assert "no packing on device 0: no NVRTC" in record.message
    assert simulator.calls("cuModuleLoadData") == 0


def test_without_the_library_of_the_host_there_is_none(
    driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_space, "_FOLDER", tmp_path)
    assert driver.packing(0) is None


def test_without_the_source_there_is_none(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise FileNotFoundError("packing.cu")

    monkeypatch.setattr(module, "kernel_source", missing)
    assert driver.packing(0) is None


def test_no_room_now_is_no_reason_for_later(simulator: Simulator, driver: CudaDriver) -> None:
    simulator.fail("cuModuleLoadData", NO_ROOM)
    assert driver.packing(0) is None
    assert use(driver)


def test_an_image_that_does_not_load_is_compiled_again(
    simulator: Simulator, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = Images(module.kernel_source())
    monkeypatch.setattr(nvrtc, "version", lambda: "99.9")
    monkeypatch.setattr(nvrtc, "compile_for", lambda source, architecture: b"a new image")
    images.keep(b"an old image", ARCHITECTURE, "99.9")
    simulator.fail("cuModuleLoadData", 200)
    assert use(driver)
    assert images.cached(ARCHITECTURE) == b"a new image"
