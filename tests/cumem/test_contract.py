"""The contract suite over the simulated CUDA driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import settings

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.settings import BackendSettings
from sleepbackends.testing import BackendContractTests
from tests.simulators.cuda import Simulator


class TestCumem(BackendContractTests):
    # One block for each allocation, as the suite counts them.
    options: ClassVar[CumemOptions] = CumemOptions(share_below_bytes=0)

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


class TestVerifying(TestCumem):
    options: ClassVar[CumemOptions] = CumemOptions(
        share_below_bytes=0, verify="resume", retention="none"
    )
    random_settings = settings(BackendContractTests.random_settings, max_examples=30)


class TestDisk(TestCumem):
    options: ClassVar[CumemOptions] = CumemOptions(share_below_bytes=0, tier="disk")
    random_settings = settings(BackendContractTests.random_settings, max_examples=30)


class TestSharing(TestCumem):
    random_settings = settings(BackendContractTests.random_settings, max_examples=30)

    @pytest.fixture(autouse=True)
    def _shared(self, tmp_path: Path) -> None:
        self._directory = tmp_path

    def make_backend(self, settings: BackendSettings) -> CumemBackend:
        options = CumemOptions(
            share_below_bytes=0, share_copies=True, share_directory=self._directory
        )
        return CumemBackend(options, settings)
