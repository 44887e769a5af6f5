"""One of two processes with a GPU each: ``python two_ranks.py RANK RENDEZVOUS``.

Rank 0 plays the scenario, measures and checks; rank 1 does what it broadcasts over the
engine's own NCCL group, while the group that is being tested drives its memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import distributed

from sleepbackends import DeviceMemoryError, Orchestrator
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.ranks import TorchDistributedGroup
from tests.gpu.helpers import GIB, SLACK, free_device_bytes, holds, pattern

RANK = int(sys.argv[1])
WEIGHTS, SIZE_BYTES, KV_BYTES = 16, GIB // 4, GIB
OURS_BYTES = WEIGHTS * SIZE_BYTES + KV_BYTES
ROUNDS = 5


class Engine:
    """The memory of one rank."""

    def __init__(self) -> None:
        self.backend = CumemBackend()
        with self.backend.region("weights", RANK):
            self.weights = [pattern(SIZE_BYTES, RANK * 100 + n, RANK) for n in range(WEIGHTS)]
        with self.backend.region("kv_cache", RANK):
            self.kv_cache = torch.ones(KV_BYTES, dtype=torch.uint8, device=f"cuda:{RANK}")
        self.filler: torch.Tensor | None = None

    def check(self) -> bool:
        """Whether every byte of the weights is what it was."""
        return all(holds(tensor, RANK * 100 + n) for n, tensor in enumerate(self.weights))

    def flip(self) -> bool:
        """Change every byte, so that a sleep has to copy it; a second time changes it back."""
        for tensor in self.weights:
            tensor.bitwise_not_()
        torch.cuda.synchronize(RANK)
        return True

    def fill(self) -> bool:
        """Leave less memory than a wake-up needs."""
        self.filler = torch.empty(
            free_device_bytes(RANK) - OURS_BYTES // 2, dtype=torch.uint8, device=f"cuda:{RANK}"
        )
        return True

    def empty(self) -> bool:
        """Make room again."""
        self.filler = None
        torch.cuda.empty_cache()
        return True

    def free(self) -> int:
        """Bytes that are free on this rank's device."""
        return free_device_bytes(RANK)

    def add_up(self) -> bool:
        """Whether the communicator works."""
        tensor = torch.full((1024,), RANK + 1, device=f"cuda:{RANK}")
        distributed.all_reduce(tensor)
        return bool((tensor == 3).all())


def everywhere(engine: Engine, what: str) -> list[Any]:
    """Have both ranks do something; from rank 0."""
    distributed.broadcast_object_list([what], src=0, device=torch.device("cuda", RANK))
    found: list[Any] = [None, None]
    distributed.all_gather_object(found, getattr(engine, what)())
    return found


def obey(engine: Engine) -> None:
    while True:
        box: list[Any] = [None]
        distributed.broadcast_object_list(box, src=0, device=torch.device("cuda", RANK))
        if box[0] is None:
            return
        distributed.all_gather_object([None, None], getattr(engine, box[0])())


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def play(engine: Engine, group: TorchDistributedGroup) -> dict[str, float]:
    orchestrator = Orchestrator(group)
    before = everywhere(engine, "free")
    report = orchestrator.sleep()
    assert report.released_bytes == 2 * OURS_BYTES, report
    for was, now in zip(before, everywhere(engine, "free"), strict=True):
        assert now - was > OURS_BYTES - SLACK, "both gave their memory back"
    assert everywhere(engine, "add_up") == [True, True], "collectives go on while asleep"

    assert everywhere(engine, "fill")
    free = engine.free()
    try:
        orchestrator.wake_up()
    except DeviceMemoryError as error:
        assert "rank" in str(error), error
        assert not error.report.changed
    else:
        raise AssertionError("there is no room")
    engine.empty()
    try:
        orchestrator.wake_up()
    except DeviceMemoryError as error:
        assert "rank 1: " in str(error), error
        assert not error.report.changed
    else:
        raise AssertionError("there is no room on rank 1")
    for number, rank in group.state().ranks.items():
        assert rank.mapped_bytes == 0, f"rank {number} is not asleep"
    assert engine.free() > free, "rank 0, which had room, took none"
    everywhere(engine, "empty")
    assert orchestrator.wake_up().serving
    assert everywhere(engine, "check") == [True, True]
    assert everywhere(engine, "add_up") == [True, True]
    assert orchestrator.release_kv_cache().released_bytes == 2 * KV_BYTES
    assert orchestrator.wake_up().serving
    return links(engine, group)


def links(engine: Engine, group: TorchDistributedGroup) -> dict[str, float]:
    """Time one rank by itself and both together, in turn."""
    alone: dict[str, list[float]] = {"down": [], "up": []}
    both: dict[str, list[float]] = {"down": [], "up": []}
    for _ in range(ROUNDS):
        everywhere(engine, "flip")
        alone["down"].append(seconds(lambda: engine.backend.suspend(1)))
        alone["up"].append(seconds(engine.backend.resume))
        everywhere(engine, "flip")
        both["down"].append(seconds(lambda: group.suspend(1)))
        both["up"].append(seconds(group.resume))
    assert everywhere(engine, "check") == [True, True]
    return {f"alone_{way}_s": median(times) for way, times in alone.items()} | {
        f"both_{way}_s": median(times) for way, times in both.items()
    }


def main() -> None:
    torch.cuda.set_device(RANK)
    distributed.init_process_group(
        "nccl" if distributed.is_nccl_available() else "gloo",
        init_method=f"file://{sys.argv[2]}",
        rank=RANK,
        world_size=2,
    )
    engine = Engine()
    assert engine.add_up(), "the communicator is there before the first sleep"
    group = TorchDistributedGroup(engine.backend, timeout_s=120.0)
    if RANK:
        obey(engine)
        group.serve()
    else:
        found = play(engine, group)
        distributed.broadcast_object_list([None], src=0, device=torch.device("cuda", RANK))
        group.close()
        sys.stdout.write(json.dumps(found) + "\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
