"""The processes of the tests over gloo: ``python gloo_rank.py SCENARIOS COUNT RENDEZVOUS``.

It forks one process a rank, because importing torch takes longer than all scenarios, and
prints how each ended. Rank 0 plays the scenario and checks; the others do what it broadcasts
over the engine's own process group, while the group that is being tested drives their ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed

from sleepbackends import (
    Control,
    Orchestrator,
    RankLostError,
    RequestError,
    SleepBackendsError,
    TransitionTimeoutError,
    UnsupportedOperationError,
)
from sleepbackends.ranks import TorchDistributedGroup
from sleepbackends.testing import FakeEngine
from tests.ranks.parts import (
    CONTENTS,
    DEADLINE_S,
    SIZE,
    TAGS,
    Parts,
    alike,
    check_fault,
    each_fault,
    host,
)

LIMITS: dict[str, Any] = {"timeout_s": 30.0, "grace_s": 5.0}
COUNT = int(sys.argv[2])
RANK = 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def told(message: Any = None) -> Any:
    """Broadcast from rank 0 over the engine's own group."""
    box = [message]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def gathered(value: Any) -> list[Any]:
    everybody: list[Any] = [None] * COUNT
    distributed.all_gather_object(everybody, value)
    return everybody


def faults_on(rank: int) -> Callable[[dict[str, Any]], int]:
    def break_at(faults: dict[str, Any]) -> int:
        told((rank, faults))
        return int(gathered(0)[rank])

    return break_at


def obey(part: Parts) -> None:
    """Break steps as rank 0 says, until it says nothing more."""
    while (order := told()) is not None:
        rank, faults = order
        gathered(part.break_at(faults) if rank == RANK else 0)


def cycle(orchestrator: Orchestrator, part: Parts, sleepers: int = COUNT) -> None:
    report = orchestrator.sleep()
    assert report.released_bytes == 6 * SIZE * sleepers, report
    assert len(report.steps[0].ranks) == sleepers
    assert orchestrator.wake_up().serving
    assert orchestrator.release_kv_cache().released_bytes == 2 * SIZE * sleepers
    assert orchestrator.state().sleep_state.value == "kv_cache_released"
    assert orchestrator.wake_up().serving
    assert part.holds("weights")
    assert part.holds("lora")


def driver(part: Parts) -> None:
    """Rank 0 commands: every verb, then a fault on rank 1 at every step of every phase."""
    group = TorchDistributedGroup(part.backend, **LIMITS)
    assert group.capabilities == part.backend.capabilities
    if RANK:
        try:
            group.suspend(1)
        except UnsupportedOperationError as error:
            assert "serve()" in error.hint
        else:
            raise AssertionError("rank 0 commands")
        obey(part)
        group.serve()
        return
    engine = FakeEngine()
    cycle(Orchestrator(group, hooks=engine.hooks()), part)
    assert engine.named() == ["quiesce", "drop_caches", "unquiesce"] * 2
    for verb, step, call in each_fault():
        check_fault(group, verb, step, call, faults_on(1))
    told(None)
    assert part.holds("weights")
    group.close()


def spmd(part: Parts) -> None:
    """Every rank calls; calls that differ are refused everywhere, as is one that is missed."""
    group = TorchDistributedGroup(part.backend, style="spmd", **LIMITS)
    orchestrator = Orchestrator(group)
    cycle(orchestrator, part)
    assert len(set(map(str, gathered(group.state().tags)))) == 1, "all know the same"
    try:
        group.suspend(1 + RANK)
    except RequestError as error:
        assert "same calls" in error.hint
    else:
        raise AssertionError("calls that differ")
    assert not group.state().asleep_tags()
    part.break_at({"save": [0]} if RANK == 1 else {})
    try:
        orchestrator.sleep()
    except SleepBackendsError as error:
        assert "rank 1: suspend failed" in str(error)
        assert not error.report.changed
    else:
        raise AssertionError("a fault that came nowhere")
    part.break_at({})
    assert orchestrator.state().serving
    if RANK == 0:
        try:
            group.suspend(1, control=Control(timeout_s=0.2))
        except TransitionTimeoutError as error:
            assert "rank 1 did not come to suspend" in str(error)
        else:
            raise AssertionError("rank 1 did not call")
    distributed.barrier()
    cycle(orchestrator, part)
    orchestrator.close()


def eight(part: Parts) -> None:
    """One rank of eight fails at every step; at last one is killed while all save."""
    group = TorchDistributedGroup(part.backend, **LIMITS)
    if RANK:
        obey(part)
        if RANK == 7:
            kill_on_save(part)
        group.serve()
        return
    for number, (verb, step, call) in enumerate(each_fault()):
        rank = 1 + number % 7
        check_fault(group, verb, step, call, faults_on(rank), rank)
    told(None)
    started = time.monotonic()
    try:
        group.suspend(1, control=Control(timeout_s=DEADLINE_S))
    except RankLostError as error:
        assert error.ranks == (7,)
        assert not error.report.changed
    else:
        raise AssertionError("rank 7 has died")
    assert time.monotonic() - started < DEADLINE_S
    assert set(group.state().ranks) == set(range(7))
    assert not group.state().asleep_tags(), "all that live are awake"
    group.forget_lost()
    group.suspend(1)
    assert group.state().mapped_bytes == 0
    group.resume()
    assert part.holds("weights")
    group.close()


def kill_on_save(part: Parts) -> None:
    def save(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    part.backend.save = save


def hang_on_save(part: Parts, until: threading.Event) -> None:
    real = part.backend.save

    def save(blocks: Any, control: Control) -> Any:
        until.wait(30)
        return real(blocks, control)

    part.backend.save = save


def died(part: Parts) -> None:
    """Rank 2 dies while all save, and the others go on; then rank 0 dies, and rank 1 is told."""
    group = TorchDistributedGroup(part.backend, **LIMITS)
    if RANK == 2:
        kill_on_save(part)
    if RANK:
        try:
            group.serve()
        except RankLostError as error:
            assert error.ranks == (0,)
            for _ in range(200):
                if not part.backend.state().asleep_tags():
                    break
                time.sleep(0.02)
            assert all(part.holds(tag) for tag in CONTENTS), "what rank 0 had begun is undone"
            part.backend.suspend(1)
            part.backend.resume()
            assert part.holds("weights")
            say("rank 1 is usable")
            return
        raise AssertionError("rank 0 closed nothing")
    orchestrator = Orchestrator(group)
    started = time.monotonic()
    try:
        orchestrator.sleep(timeout_s=10)
    except RankLostError as error:
        assert error.ranks == (2,)
        assert "rank 2 has gone" in str(error)
        assert set(error.report.ranks) == {0, 1}
        assert not error.report.changed
    else:
        raise AssertionError("rank 2 has died")
    assert time.monotonic() - started < 10
    assert orchestrator.state().serving
    assert all(part.holds(tag) for tag in TAGS)
    assert group.lost_ranks == (2,)
    try:
        orchestrator.sleep(timeout_s=10)
    except RankLostError as error:
        assert error.ranks == (2,)
    else:
        raise AssertionError("rank 2 was not forgotten")
    assert group.forget_lost() == (2,)
    cycle(orchestrator, part, sleepers=2)
    assert alike(group.state())
    kill_on_save(part)  # rank 1 has saved by then, or saves
    orchestrator.sleep(timeout_s=10)


def hung(part: Parts) -> None:
    """Rank 1 hangs while it saves: named at the deadline, harmless afterwards."""
    group = TorchDistributedGroup(part.backend, timeout_s=30.0, grace_s=0.5)
    release = threading.Event()
    if RANK:
        hang_on_save(part, release)
        told()
        release.set()
        group.serve()
        return
    started = time.monotonic()
    try:
        group.suspend(1, control=Control(timeout_s=1.5))
    except TransitionTimeoutError as error:
        assert "rank 1 did not say how it ended" in str(error)
    else:
        raise AssertionError("rank 1 hangs")
    assert time.monotonic() - started < 15
    assert all(part.holds(tag) for tag in TAGS)
    told("go on")
    for _ in range(200):
        group.refresh()
        if not group.state().asleep_tags():
            break
        time.sleep(0.02)
    group.suspend(1)
    group.resume()
    assert alike(group.state())
    group.close()


def play(rank: int) -> None:
    global RANK
    RANK = rank
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[3]}",
        rank=RANK,
        world_size=COUNT,
        timeout=timedelta(seconds=60),
    )
    scenarios = sys.argv[1].split(",")
    for name in scenarios:
        globals()[name](host(RANK))
    if not {"died", "eight"} & set(scenarios):
        distributed.barrier()
        distributed.destroy_process_group()


def main() -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=play, args=[rank]) for rank in range(COUNT)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    say(f"exit codes: {[process.exitcode for process in processes]}")
    for process in processes:
        process.kill()


if __name__ == "__main__":
    main()
