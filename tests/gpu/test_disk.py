"""Saved bytes that are not in pinned memory: on a disk, and where pinning is refused."""

from __future__ import annotations

import pytest

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.errors import HostMemoryError
from sleepbackends.vmm import places

from .helpers import LARGE, MIB, holds, pattern


@pytest.mark.parametrize("retention", ["retain", "none"])
def test_weights_on_a_disk(retention: str) -> None:
    options = CumemOptions.model_validate({"tier": "disk", "retention": retention})
    backend = CumemBackend(options)
    try:
        with backend.region("weights"):
            tensors = [pattern(LARGE + 3 * MIB + 4, seed) for seed in range(8)]
        total = backend.suspend(1).copied_bytes
        backend.resume()
        assert all(holds(tensor, seed) for seed, tensor in enumerate(tensors))
        report = backend.suspend(1)
        assert report.clean_bytes == (total if retention == "retain" else 0)
        backend.resume()
        assert all(holds(tensor, seed) for seed, tensor in enumerate(tensors))
    finally:
        backend.close()


def test_what_the_driver_does_not_pin(
    backend: CumemBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CudaDriver.pin

    def only_buffers(driver: CudaDriver, host: int, size_bytes: int) -> None:
        if size_bytes != places.BUFFER_BYTES:
            raise HostMemoryError("no pinning of so much here")
        real(driver, host, size_bytes)

    monkeypatch.setattr(CudaDriver, "pin", only_buffers)
    with backend.region("weights"):
        tensors = [pattern(4 * LARGE + MIB, seed) for seed in range(4)]
    for _ in range(2):
        backend.suspend(1)
        assert backend._ring.held_bytes > 0
        backend.resume()
        assert all(holds(tensor, seed) for seed, tensor in enumerate(tensors))
