"""Room for what kernels read and write: used again when it is free, never before."""

from __future__ import annotations

from sleepbackends.cumem.tables import LEAST_ROWS
from tests.cumem.hashed import Memory, expected, memory
from tests.simulators.cuda import Simulator

__all__ = ["memory"]


def test_a_table_that_is_full_is_used_again_or_another_made(
    simulator: Simulator, memory: Memory
) -> None:
    half = [(8, 8)] * (LEAST_ROWS // 2 - 1)
    for _ in range(3):
        assert memory.queued(half).result() == expected(half)
    assert simulator.calls("cuMemHostAlloc") == 1
    first, second = memory.queued(half), memory.queued([(16, 9)] * (3 * LEAST_ROWS))
    assert simulator.calls("cuMemHostAlloc") == 2
    other = [(24, 8)] * len(half)
    for _ in range(3):
        assert memory.queued(other).result() == expected(other)
    assert second.result() == expected([(16, 9)]) * (3 * LEAST_ROWS)
    assert first.result() == expected(half)
    assert simulator.calls("cuMemHostAlloc") == 2


def test_results_that_nobody_asks_for_do_not_pile_up(simulator: Simulator, memory: Memory) -> None:
    most = [(8, 8)] * LEAST_ROWS
    for _ in range(5):
        memory.queued(most)
        memory.driver.lane(0, "hash").wait()
    assert simulator.calls("cuMemHostAlloc") == 1
    kept = memory.queued(most)
    memory.driver.lane(0, "hash").wait()
    assert memory.queued([(0, 8)]).result() == expected([(0, 8)])
    assert kept.result() == expected(most), "its rows were not given to another"


def test_what_is_still_being_computed_is_not_overwritten(
    simulator: Simulator, memory: Memory
) -> None:
    simulator.set_on_demand(True)
    most = [(8, 8)] * LEAST_ROWS
    memory.queued(most)
    later = memory.queued(most)
    assert simulator.calls("cuMemHostAlloc") == 2
    assert later.result() == expected(most)


def test_everything_can_be_had_beforehand(simulator: Simulator, memory: Memory) -> None:
    assert memory.driver.fingerprints.prepare(0, 5000)
    names = ("cuModuleLoadData", "cuMemAlloc", "cuMemHostAlloc", "cuStreamCreate")
    calls = [simulator.calls(name) for name in names]
    cuts = [(0, 10)] * 2500
    pending = [memory.queued(cuts) for _ in range(2)]
    assert [simulator.calls(name) for name in names] == calls
    assert [each.result() for each in pending] == [expected(cuts)] * 2


def test_rows_of_a_refused_launch_wait_for_the_device(simulator: Simulator, memory: Memory) -> None:
    simulator.set_on_demand(True)
    most = [(8, 8)] * LEAST_ROWS
    simulator.fail("cuLaunchKernel", 1)
    assert memory.queue(most) is None
    assert simulator.process_usage().queued_operations == 0, "it may be reading the spans still"
    assert memory.queued(most).result() == expected(most)
    assert simulator.calls("cuMemHostAlloc") == 1
    simulator.fail("cuLaunchKernel", 1)
    simulator.fail("cuStreamSynchronize", 1)
    assert memory.queue(most) is None
    assert memory.queued(most).result() == expected(most)
    assert simulator.calls("cuMemHostAlloc") == 2, "nobody knows when it is done with them"


def test_what_was_read_holds_nothing_in_the_driver(simulator: Simulator, memory: Memory) -> None:
    pending = memory.queued()
    assert simulator.process_usage().live_events == 1
    pending.result()
    assert simulator.process_usage().live_events == 0
