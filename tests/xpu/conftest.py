from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.xpu import mutations

mutations.install()  # before anything imports what it takes the place of

# ruff: noqa: E402 - for the same reason
from sleepbackends.vmm.accelerator import Accelerator
from tests.simulators.level_zero import Simulator
from tests.xpu.fixtures import host_library, level_zero_library, make, simulator

if TYPE_CHECKING:
    from tests.xpu.stand_in import XpuTorch

__all__ = ["host_library", "level_zero_library", "make", "simulator"]


@pytest.fixture
def torch(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> XpuTorch:
    """A torch with XPU devices."""
    from tests.xpu.stand_in import XpuTorch  # imports torch, which most of these tests do not need

    torch = XpuTorch(simulator)
    monkeypatch.setattr(Accelerator, "import_torch", lambda _: torch)
    return torch
