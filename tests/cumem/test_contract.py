"""The contract suite over the simulated CUDA driver."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import settings

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.settings import BackendSettings
from sleepbackends.testing import BackendContractTests
from sleepbackends.testing.contract import faults, fixtures, random_sequences
from sleepbackends.vmm.packing import packer
from tests.packing import contents
from tests.simulators.cuda import Simulator


class TestCumem(BackendContractTests):
    # One block for each allocation, as the suite counts them. What is packed is in TestPacking: the
    # simulated device is slow at it, and here are blocks that are large enough.
    options: ClassVar[CumemOptions] = CumemOptions(share_below_bytes=0, packing="off")

    @pytest.fixture(autouse=True)
    def _simulated(self, simulator: Simulator) -> Iterator[None]:
        self._simulator = simulator
        yield
        usage = simulator.process_usage()
        assert usage.pinned_bytes == usage.queued_operations == usage.live_streams == 0

    def make_backend(self, settings: BackendSettings) -> CumemBackend:
        return CumemBackend(self.options, settings)

    def used_bytes(self, backend: Any) -> int:
        return self._simulator.device_usage().used_bytes


class Weights(random.Random):
    """Makes bytes that can be packed."""

    def randbytes(self, n: int) -> bytes:
        return contents("weights", n, self.getrandbits(32))


class TestPacking(TestCumem):
    """As before, with everything packed that is more than a few bytes."""

    options: ClassVar[CumemOptions] = CumemOptions(share_below_bytes=0)
    random_settings = settings(BackendContractTests.random_settings, max_examples=40)

    @pytest.fixture(autouse=True)
    def _packed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packer, "LEAST_BYTES", 1)
        monkeypatch.setattr(packer, "MOST_SLOTS", 3)
        monkeypatch.setattr(packer, "LEFT_BESIDE_BYTES", 0)
        monkeypatch.setattr(faults, "_LARGE", 2 << 20)
        for module in (fixtures, random_sequences):
            monkeypatch.setattr(module, "random", SimpleNamespace(Random=Weights))

    def test_it_packs(self) -> None:
        backend = self.make_backend(BackendSettings())
        memory = self.allocate(backend, "weights", 20_000)
        memory.write(Weights(3).randbytes(20_000))
        assert backend.suspend(1).spared_bytes > 0
        backend.resume()
        memory.free()
        backend.close()


class TestVerifying(TestCumem):
    options: ClassVar[CumemOptions] = CumemOptions(
        share_below_bytes=0, verify="resume", retention="none", packing="off"
    )
    random_settings = settings(BackendContractTests.random_settings, max_examples=30)


class TestDisk(TestCumem):
    options: ClassVar[CumemOptions] = CumemOptions(share_below_bytes=0, tier="disk", packing="off")
    random_settings = settings(BackendContractTests.random_settings, max_examples=30)


class TestSharing(TestCumem):
    random_settings = settings(BackendContractTests.random_settings, max_examples=30)

    @pytest.fixture(autouse=True)
    def _shared(self, tmp_path: Path) -> None:
        self._directory = tmp_path

    def make_backend(self, settings: BackendSettings) -> CumemBackend:
        options = CumemOptions(
            share_below_bytes=0,
            share_copies=True,
            share_directory=self._directory,
            packing="off",
        )
        return CumemBackend(options, settings)
