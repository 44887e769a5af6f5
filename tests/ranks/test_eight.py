"""Eight ranks in one process, one of which fails at every step: all asleep or all awake, in time.

The same in eight processes is in ``test_torch_distributed``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.host.backend import HostBackend
from sleepbackends.host.options import HostOptions
from sleepbackends.ranks import InProcessGroup
from sleepbackends.testing import SimulatedBackend
from tests.native.fixtures import kernel_images, native_library, simulator
from tests.ranks.parts import CONTENTS, UNDONE, Parts, check_fault, each_fault
from tests.simulators.cuda import Simulator

__all__ = ["kernel_images", "native_library", "simulator"]

COUNT = 8
FAILS = 5

UNDONE_ON_A_GPU = UNDONE - {("suspend", "save", 2), ("suspend", "unmap", 3)}
"""Once all copies are queued, what is not kept goes beside them, and that cannot be undone."""


def on_simulated_memory(rank: int) -> Parts:
    return Parts(SimulatedBackend(), rank)


def on_the_host(rank: int) -> Parts:
    return Parts(HostBackend(HostOptions(threads=1)), rank)


def on_a_gpu_of_its_own(rank: int) -> Parts:
    # One block for each allocation, as the faults count them.
    return Parts(CumemBackend(CumemOptions(share_below_bytes=0)), rank, rank)


@pytest.fixture(params=[on_simulated_memory, on_the_host, on_a_gpu_of_its_own])
def make(request: pytest.FixtureRequest) -> Callable[[int], Parts]:
    made: Callable[[int], Parts] = request.param
    if made is on_a_gpu_of_its_own:
        driver: Simulator = request.getfixturevalue("simulator")
        driver.set_devices(COUNT)
        for device in range(COUNT):
            driver.set_granularity_bytes(1 << 16, device)
    return made


def test_a_fault_on_one_of_eight_at_every_step(make: Callable[[int], Parts]) -> None:
    undone = UNDONE_ON_A_GPU if make is on_a_gpu_of_its_own else UNDONE
    parts = [make(rank) for rank in range(COUNT)]
    with closing(InProcessGroup([part.backend for part in parts])) as group:
        for verb, step, call in each_fault():
            check_fault(group, verb, step, call, parts[FAILS].break_at, FAILS, undone)
            assert all(part.holds(tag) for part in parts for tag in CONTENTS)
