"""What the simulated driver itself is trusted with: that it would notice."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.xpu.devices import Device
from sleepbackends.xpu.driver import XpuDriver
from sleepbackends.xpu.loader import ContextDesc, Loader, QueueDesc
from tests.simulators.level_zero import Simulator, environment, loading
from tests.xpu.fixtures import (
    DEVICE_LOST,
    INVALID_ARGUMENT,
    LARGE_PAGE_BYTES,
    PAGE_BYTES,
)

IN_USE, UNSUPPORTED_SIZE, UNSUPPORTED_ALIGNMENT = 0x78000006, 0x78000009, 0x7800000A


class PhysicalDesc(ctypes.Structure):
    _fields_ = (
        ("stype", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("size", ctypes.c_size_t),
    )


class Calls:
    """Calls of the loader with whatever arguments a test wants."""

    def __init__(self) -> None:
        self.ze = Loader()
        (driver,) = self.ze.handles("zeDriverGet")
        self.device = self.ze.handles("zeDeviceGet", driver)[0]
        self.context = self.new_context(driver)
        self.other = self.new_context(driver)

    def new_context(self, driver: int) -> int:
        return self.ze.handle("zeContextCreate", driver, ctypes.byref(ContextDesc()))

    def code(self, name: str, *arguments: Any) -> int:
        wide = [ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments]
        return int(self.ze.library[name](*wide)) & 0xFFFFFFFF

    def reserve(self, size_bytes: int = PAGE_BYTES) -> int:
        found = ctypes.c_void_p()
        size = ctypes.c_size_t(size_bytes)
        assert not self.code("zeVirtualMemReserve", self.context, None, size, ctypes.byref(found))
        return found.value or 0

    def create(self, size_bytes: int = PAGE_BYTES, stype: int = 0x20) -> tuple[int, int]:
        found, desc = ctypes.c_void_p(), ctypes.byref(PhysicalDesc(stype, None, 0, size_bytes))
        code = self.code(
            "zePhysicalMemCreate", self.context, self.device, desc, ctypes.byref(found)
        )
        return code, found.value or 0

    def map(self, address: int, handle: int, size_bytes: int = PAGE_BYTES) -> int:
        size = ctypes.c_size_t(size_bytes)
        return self.code("zeVirtualMemMap", self.context, address, size, handle, 0, 1)


@pytest.fixture
def calls(simulator: Simulator) -> Calls:
    return Calls()


def forgive(simulator: Simulator, *kinds: str) -> None:
    """Check what was noticed, and that the fixture finds nothing more."""
    assert set(simulator.violations()) == set(kinds)
    simulator.reset()


def test_sizes_are_whole_pages_of_the_size(calls: Calls) -> None:
    assert calls.create(PAGE_BYTES + 1)[0] == UNSUPPORTED_SIZE
    assert calls.create(LARGE_PAGE_BYTES + PAGE_BYTES)[0] == UNSUPPORTED_SIZE
    assert calls.create(0)[0] == UNSUPPORTED_SIZE
    size = ctypes.c_size_t(PAGE_BYTES - 1)
    assert calls.code("zeVirtualMemReserve", calls.context, None, size, ctypes.byref(size))


def test_the_type_of_a_descriptor_counts(calls: Calls) -> None:
    assert calls.create(stype=0x1D)[0] == INVALID_ARGUMENT


def test_what_is_mapped_is_not_mapped_or_destroyed_again(
    simulator: Simulator, calls: Calls
) -> None:
    address, (_, handle) = calls.reserve(), calls.create()
    assert calls.map(address + 4096, handle) == UNSUPPORTED_ALIGNMENT
    assert calls.map(address, handle) == 0
    assert calls.map(address, calls.create()[1]) == INVALID_ARGUMENT
    assert calls.map(calls.reserve(), handle) == INVALID_ARGUMENT, "twice"
    assert calls.code("zePhysicalMemDestroy", calls.context, handle) == IN_USE
    size = ctypes.c_size_t(PAGE_BYTES)
    assert calls.code("zeVirtualMemFree", calls.context, address, size) == IN_USE
    forgive(simulator, "destroy_mapped")


def test_another_context_is_noticed(simulator: Simulator, calls: Calls) -> None:
    address = calls.reserve()
    size = ctypes.c_size_t(PAGE_BYTES)
    assert calls.code("zeVirtualMemFree", calls.other, address, size) == INVALID_ARGUMENT
    forgive(simulator, "other_context")


def test_stale_handles_are_noticed(simulator: Simulator, calls: Calls) -> None:
    _, handle = calls.create()
    assert calls.code("zePhysicalMemDestroy", calls.context, handle) == 0
    assert calls.code("zePhysicalMemDestroy", calls.context, handle) == INVALID_ARGUMENT
    assert calls.code("zeEventQueryStatus", handle) == INVALID_ARGUMENT
    forgive(simulator, "unknown_handle")


def test_unmapping_under_a_kernel_is_noticed(simulator: Simulator, calls: Calls) -> None:
    address, (_, handle) = calls.reserve(), calls.create()
    assert calls.map(address, handle) == 0
    simulator.engine_write(address, 16, 1)
    size = ctypes.c_size_t(PAGE_BYTES)
    assert calls.code("zeVirtualMemUnmap", calls.context, address, size) == 0
    assert calls.code("zeVirtualMemUnmap", calls.context, address, size) == INVALID_ARGUMENT
    simulator.engine_wait()
    assert calls.create()[0] == DEVICE_LOST, "the kernel had a page fault"
    forgive(simulator, "unmap_in_use", "unmap_nothing", "work_faulted")


def test_engines_that_are_not_there(simulator: Simulator, calls: Calls) -> None:
    for ordinal, index in ((3, 0), (0, 1), (2, 2)):
        desc = ctypes.byref(QueueDesc(ordinal=ordinal, index=index, mode=2))
        found = ctypes.byref(ctypes.c_void_p())
        code = calls.code("zeCommandListCreateImmediate", calls.context, calls.device, desc, found)
        assert code == INVALID_ARGUMENT


def test_devices_say_that_they_are_none(simulator: Simulator) -> None:
    device: Device = XpuDriver().device(0)
    assert "not hardware" in device.name


def test_faults_fire_when_they_should(simulator: Simulator, calls: Calls) -> None:
    simulator.fail("zePhysicalMemCreate", DEVICE_LOST, nth=2, times=2)
    assert [calls.create()[0] for _ in range(4)] == [0, DEVICE_LOST, DEVICE_LOST, 0]
    assert simulator.calls("zePhysicalMemCreate") == 4


def test_without_the_loader_tests_fail_and_are_not_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "LOADER", "libze-absent.so.1")
    with pytest.raises(RuntimeError, match="make system-packages"):
        loading.load.__wrapped__()


def test_the_host_cannot_touch_device_memory() -> None:
    """Or it would do so by mistake and no test would see it."""
    code = (
        "import ctypes\n"
        "from sleepbackends.vmm.address_space import AddressSpace, library_path\n"
        "from sleepbackends.xpu.driver import XpuDriver\n"
        "driver = XpuDriver()\n"
        "space = AddressSpace(library_path('level_zero'), 'libze_loader.so.1', driver)\n"
        "address = space.allocate('weights', 1, 0)\n"
        "print(hex(address), flush=True)\n"
        "ctypes.string_at(address, 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, check=False
    )
    assert done.stdout.startswith(b"0x"), done.stderr.decode()
    assert done.returncode == -signal.SIGSEGV


def test_everything_works_with_handles_that_are_the_loaders_own() -> None:
    """As the loader gives them out where several drivers are there."""
    folder = Path(__file__).parent
    suite = [str(folder / f"test_{name}.py") for name in ("lanes", "backend")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suite],
        cwd=folder.parents[1],
        env=os.environ | {"ZE_ENABLE_LOADER_INTERCEPT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
