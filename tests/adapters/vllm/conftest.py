from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sleepbackends.adapters.vllm import versions
from sleepbackends.adapters.vllm.allocator import installed
from sleepbackends.adapters.vllm.versions import SUPPORTED
from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.vmm.accelerator import Accelerator
from tests.adapters.vllm.engine import Engine, prepare
from tests.adapters.vllm.released import ReleasedVllm, forget
from tests.adapters.vllm.sources import UnavailableError, released
from tests.native.fixtures import kernel_images, native_library, simulator
from tests.simulators.cuda import Simulator
from tests.simulators.pool_torch import PoolTorch

__all__ = ["kernel_images", "native_library", "simulator"]

MakeEngine = Callable[..., Engine]

# To see what a release that is not known would need: SLEEPBACKENDS_TEST_VLLM=0.34.0 is taken
# for one like the newest.
VERSIONS = [*SUPPORTED, *filter(None, [os.environ.get("SLEEPBACKENDS_TEST_VLLM")])]

WITH_OPTION = [v for v in VERSIONS if v not in SUPPORTED or SUPPORTED[v].has_option]
"""Releases in which an engine names its backend."""

WITHOUT_OPTION = [v for v in VERSIONS if v not in WITH_OPTION]


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def vllm(version: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReleasedVllm]:
    try:
        root = released(version)
    except UnavailableError as error:
        pytest.skip(str(error))
    for name in [name for name in os.environ if name.startswith(("SLEEPBACKENDS_", "VLLM_"))]:
        monkeypatch.delenv(name)
    if version not in SUPPORTED:
        newest = list(SUPPORTED.values())[-1]
        monkeypatch.setattr(versions, "SUPPORTED", {**SUPPORTED, version: newest})
    yield ReleasedVllm(version, root, monkeypatch)
    forget()


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> PoolTorch:
    """A torch whose pools work on the simulated driver."""
    torch = PoolTorch()
    monkeypatch.setattr(Accelerator, "import_torch", lambda _: torch)
    return torch


@pytest.fixture
def make_engine(
    vllm: ReleasedVllm, torch: PoolTorch, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeEngine]:
    """Start an engine of the release, with our plugin loaded by vLLM itself."""
    monkeypatch.setenv("SLEEPBACKENDS_VLLM", "1")
    monkeypatch.setenv("SLEEPBACKENDS_BACKEND", "cumem")
    prepare(vllm)
    CudaDriver()  # as a worker whose device is set
    engines = []

    def make(**model: Any) -> Engine:
        engines.append(Engine(vllm, torch, **model))
        return engines[-1]

    yield make
    allocator = installed()
    for engine in engines:
        engine.runner.shutdown()
    if allocator is not None:
        allocator.release_pools()
    assert simulator.process_usage().pinned_bytes == 0
    assert simulator.device_usage().live_handles == 0


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()
