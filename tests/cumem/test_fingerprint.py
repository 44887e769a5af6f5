"""Fingerprints of device memory by the kernel, from the cached image to the sums that come back."""

from __future__ import annotations

import mmap
import random
import threading
from typing import Any

import pytest

from sleepbackends.cumem import fingerprint as module
from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.errors import ClosedError
from sleepbackends.hostmemory import driver as host
from tests.cumem.hashed import DATA, Memory, expected, memory
from tests.native.fixtures import DEVICES
from tests.simulators.cuda import Simulator

__all__ = ["memory"]


def test_the_sums_are_those_of_the_bytes(memory: Memory) -> None:
    for device in range(DEVICES):
        pending = memory.queued(device=device)
        assert pending.result() == expected()
        assert pending.result() == expected(), "asked again"


def test_no_spans(simulator: Simulator, memory: Memory) -> None:
    assert memory.queued([]).result() == []
    assert simulator.calls("cuLaunchKernel") == simulator.calls("cuModuleLoadData") == 0


def test_many_spans_of_many_sizes(memory: Memory) -> None:
    source = random.Random(5)  # noqa: S311 - test data
    cuts = []
    for _ in range(300):
        offset = source.randrange(len(DATA))
        cuts.append((offset, min(source.choice([8, 100, 3000]), len(DATA) - offset)))
    assert memory.queued(cuts).result() == expected(cuts)


class Pinned:
    """A page of host memory that a driver has pinned."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self.address = host.reserve(mmap.PAGESIZE)
        host.map_memory(self.address, mmap.PAGESIZE)
        host.populate(self.address, mmap.PAGESIZE)
        driver.pin(self.address, mmap.PAGESIZE)

    def give_back(self) -> None:
        self._driver.unpin(self.address)
        host.release(self.address, mmap.PAGESIZE)


@pytest.mark.parametrize("size_bytes", [0, 1, module.BLOCK_BYTES, module.BLOCK_BYTES + 1, 700_000])
def test_the_largest_span_says_how_many_blocks_there_are(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    launched = []
    lane = type(memory.driver.lane(0, "hash"))
    real = lane.launch

    def launch(self: Any, function: Any, blocks: int, threads: int, arguments: Any) -> None:
        if len(arguments) == 4:
            launched.append((blocks, threads))
        real(self, function, blocks, threads, arguments)

    monkeypatch.setattr(lane, "launch", launch)
    cuts = [(0, 1), (0, size_bytes), (0, 0)]
    assert memory.queued(cuts).result() == expected(cuts)
    assert launched == [(3 * max(1, -(-size_bytes // module.BLOCK_BYTES)), 256)]
    monkeypatch.setattr(module, "_MOST_BLOCKS", 7)
    assert memory.queued(cuts).result() == expected(cuts)
    assert launched[1][0] <= 7


def test_several_are_outstanding_while_copies_run(simulator: Simulator, memory: Memory) -> None:
    simulator.set_on_demand(True)
    groups = [[(number, 100 * number)] * 32 for number in range(16)]
    pending = [memory.queued(cuts) for cuts in groups]
    memory.driver.lane(0, "fill").fill(memory.at[0], 0, 7)
    order = [3, 0, 15, *(set(range(16)) - {3, 0, 15})]
    for number in order:
        assert pending[number].result() == expected(groups[number])
    assert simulator.calls("cuMemAlloc") == DEVICES + 1, "one table for all of them"


def test_threads_share_it(memory: Memory) -> None:
    errors: list[BaseException] = []

    def use(number: int) -> None:
        try:
            for _ in range(20):
                cuts = [(number, 1000 * number)] * 7
                assert memory.queued(cuts, number % DEVICES).result() == expected(cuts)
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_other_threads_run_while_one_waits(simulator: Simulator, memory: Memory) -> None:
    simulator.set_copy_rate(1000)
    before = Pinned(memory.driver)
    memory.driver.lane(0, "hash").to_host(before.address, memory.at[0], 300)  # 0.3 s
    pending = memory.queued([(0, 8)] * 10)
    waiting = threading.Thread(target=pending.result)
    waiting.start()
    turns = 0
    while waiting.is_alive():
        turns += 1
        simulator.calls("cuInit")
    assert turns > 1000
    before.give_back()


def test_nothing_waits_for_the_copies_of_others(simulator: Simulator, memory: Memory) -> None:
    """Copies share the engines of the device, whatever lane they are on."""
    names = ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync")
    calls = [simulator.calls(name) for name in names]
    assert memory.queued().result() == expected()
    assert [simulator.calls(name) for name in names] == calls


def test_closing_ends_what_was_not_asked_for(memory: Memory) -> None:
    pending, read = memory.queued(), memory.queued([(0, 8)])
    assert read.result() == expected([(0, 8)])
    memory.driver.close()
    with pytest.raises(ClosedError, match="went with their driver"):
        pending.result()
    assert read.result() == expected([(0, 8)])


def test_the_source_is_part_of_the_package() -> None:
    source = module.kernel_source()
    assert b'extern "C" __global__' in source.text
    assert [name for name, _ in source.headers] == ["fingerprint.h", "carry.h"]
