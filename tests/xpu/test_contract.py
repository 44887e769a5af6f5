"""The contract suite over the simulated driver, through Intel's real loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import settings

from sleepbackends.settings import BackendSettings
from sleepbackends.testing import BackendContractTests
from sleepbackends.xpu.backend import XpuBackend
from sleepbackends.xpu.options import XpuOptions
from tests.simulators.level_zero import Simulator
from tests.xpu.fixtures import check_nothing_is_held
from tests.xpu.stand_in import XpuTorch


class TestXpu(BackendContractTests):
    # One block for each allocation, as the suite counts them.
    options: ClassVar[XpuOptions] = XpuOptions(share_below_bytes=0)

    @pytest.fixture(autouse=True)
    def _simulated(self, simulator: Simulator) -> Iterator[None]:
        self._simulator = simulator
        yield
        check_nothing_is_held(simulator)

    def make_backend(self, settings: BackendSettings) -> XpuBackend:
        return XpuBackend(self.options, settings)

    def used_bytes(self, backend: Any) -> int:
        return self._simulator.usage("used_bytes")

    def test_two_hundred_random_sequences_are_what_runs(self) -> None:
        assert BackendContractTests.random_settings.max_examples >= 200


class TestVerifying(TestXpu):
    options: ClassVar[XpuOptions] = XpuOptions(
        share_below_bytes=0, verify="resume", retention="none"
    )
    random_settings = settings(BackendContractTests.random_settings, max_examples=30)


class TestWithoutImports(TestXpu):
    """A driver that cannot import host memory: every copy is waited for."""

    random_settings = settings(BackendContractTests.random_settings, max_examples=30)

    @pytest.fixture(autouse=True)
    def _no_imports(self, simulator: Simulator) -> None:
        simulator.set("imports_exist", 0)


class TestWithTorch(TestXpu):
    """In torch's context, with fingerprints through torch and regions that route torch."""

    random_settings = settings(BackendContractTests.random_settings, max_examples=30)

    @pytest.fixture(autouse=True)
    def _torch(self, torch: XpuTorch) -> None: ...
