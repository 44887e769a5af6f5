"""What tests in several places share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.packaging.environments import Distributions, build, index_problem
from tests.simulators.cuda import Simulator, loaded_or_skip
from tests.simulators.cuda.driving import UNIT_BYTES, Driven, HostBuffer


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    simulator = loaded_or_skip()
    simulator.reset()
    yield simulator
    simulator.reset()


@pytest.fixture
def cuda(simulator: Simulator) -> Driven:
    return Driven()


@pytest.fixture
def pinned(cuda: Driven) -> HostBuffer:
    buffer = HostBuffer(byte=5)
    cuda.call("cuMemHostRegister", buffer.address, UNIT_BYTES, 0)
    return buffer


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """What would be published; without the package index there is nothing to build it with."""
    problem = index_problem(tmp_path_factory.mktemp("fetched"))
    if problem:
        pytest.skip(f"the package index cannot be reached: {problem}")
    return build(tmp_path_factory.mktemp("dist"))
