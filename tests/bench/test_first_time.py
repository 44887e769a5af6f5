"""What a machine does once is done before anything is measured."""

from __future__ import annotations

import pytest

from sleepbackends.bench import first_time
from sleepbackends.bench.first_time import do_once
from sleepbackends.cumem.driver import CudaDriver
from tests.native.fixtures import kernel_images, native_library, simulator
from tests.simulators.cuda import Simulator

__all__ = ["kernel_images", "native_library", "simulator"]


def test_each_device_gets_its_kernels_and_memory_is_touched_once(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[tuple[int, float]] = []

    def touch(size_bytes: int, driver: CudaDriver, *, until: float) -> int:
        assert driver is gpu
        touched.append((size_bytes, until))
        return size_bytes - 1

    monkeypatch.setattr(first_time, "touch_host_memory", touch)
    gpu = CudaDriver()
    compiled: list[str] = []
    monkeypatch.setattr(
        gpu.compiler, "image", lambda source, architecture: compiled.append(source.name)
    )
    try:
        assert do_once(1 << 20, gpu, range(2), until=3.0) == (1 << 20) - 1
        assert touched == [(1 << 20, 3.0)]
        assert sorted(compiled) == ["fingerprint", "fingerprint", "packing", "packing"]
        assert simulator.calls("cuModuleLoadData") == 0
    finally:
        gpu.close()
