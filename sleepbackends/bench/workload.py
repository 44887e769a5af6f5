"""One measurement in a process of its own.

The module is run with a ``Spec`` as JSON and the name of a file, to which rows are appended,
one JSON object a line, each as soon as it is known.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sleepbackends.bench.host_memory import touch_host_memory
from sleepbackends.bench.machine import describe
from sleepbackends.bench.peers import Allocator, open_allocator
from sleepbackends.bench.request import DESCRIBE, FIRST_TIME, Spec
from sleepbackends.bench.rows import (
    BOTH_DEVICES,
    IN_TURN,
    OURS,
    PLAIN_COPY,
    STAGED,
    Emit,
    Row,
)
from sleepbackends.bench.weights import Weights
from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.termination import end_with_parent

if TYPE_CHECKING:
    import torch

GIB, MIB = 1 << 30, 1 << 20

PLAIN_GIB = 4.0
"""The most that is pinned for plain copies; larger amounts go through it several times."""

KV_TIMES = 5
"""How often the KV cache goes and comes in a round: the driver takes once or twice the time
to give the same memory back, so that one figure says little."""

SLEEP_TIMES = 3
"""How often weights go and come in a round, where allocators take turns."""

IN_TURN_MIB = 256
"""The size of their tensors, at most."""

ASLEEP_S = 0.3
"""How long a KV cache is away where it is compared in turn; nobody releases one for less."""

Clock = Callable[[Callable[[], object]], float]
"""Makes a call and returns how many seconds it took."""


def timed(call: Callable[[], object], devices: int = 1) -> float:
    """Return how many seconds a call takes, with the devices idle before and after."""
    import torch

    def synchronize() -> None:
        for device in range(devices):
            torch.cuda.synchronize(device)

    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - started


def measure_allocator(spec: Spec, emit: Emit) -> None:
    """Run the workload on one allocator, with all its memory on the first device."""
    import torch

    torch.zeros(1, device="cuda")
    allocator = open_allocator(spec.peer, _folder(spec), spec.fill)
    weights = Weights(int(spec.tensor_mib * MIB))
    with allocator.region("weights"):
        weights.allocate(int(spec.weights_gib * 1024 / spec.tensor_mib))
    with allocator.region("kv_cache"):
        cache = _kv_cache(spec)
    weights.fill()
    for number in range(spec.rounds):
        measure_round(spec, number, allocator, weights, emit)
    del cache
    if not allocator.exits_cleanly:
        os._exit(0)


def measure_round(
    spec: Spec,
    number: int,
    allocator: Allocator,
    weights: Weights,
    emit: Emit,
    clock: Clock = timed,
) -> None:
    """Measure every case once, and the KV cache alone a few times.

    Raises
    ------
    ContentsLostError
        If the weights are not what they were.
    """
    weights.change(number)
    case = "suspend_dirty" if number else "suspend_first"
    emit(spec.row(case, number, clock(allocator.suspend)))
    emit(spec.row("resume", number, clock(allocator.resume)))
    weights.check()
    if spec.peer == OURS:
        emit(spec.row("suspend_clean", number, clock(allocator.suspend)))
        allocator.resume()
        weights.check()
        weights.change_some(number)
        emit(spec.row("suspend_1pct", number, clock(allocator.suspend)))
        allocator.resume()
        weights.check()
    for _ in range(KV_TIMES if spec.kv_gib else 0):
        emit(spec.row("discard_kv", number, clock(allocator.discard_kv)))
        weights.check()
        emit(spec.row("resume_kv", number, clock(allocator.resume_kv)))
        weights.check()


def measure_staged(spec: Spec, emit: Emit) -> None:
    """Measure suspends after everything was changed and staged, the first one included."""
    import torch

    from sleepbackends import Orchestrator, SleepConfig
    from sleepbackends.cumem.backend import CumemBackend

    spec = dataclasses.replace(spec, peer=OURS)
    torch.zeros(1, device="cuda")
    backend = CumemBackend()
    weights = Weights(int(spec.tensor_mib * MIB))
    with backend.region("weights"):
        weights.allocate(int(spec.weights_gib * 1024 / spec.tensor_mib))
    weights.fill()
    with Orchestrator(backend, config=SleepConfig(stage_limit_gib_s=1000.0)) as orchestrator:
        for number in range(spec.rounds):
            weights.change(number)
            orchestrator.stage(background=False).wait()
            emit(spec.row("suspend_first_staged", number, timed(orchestrator.sleep)))
            orchestrator.wake_up()
            weights.check()


def _folder(spec: Spec) -> Path | None:
    return Path(spec.folder) if spec.folder else None


def _kv_cache(spec: Spec) -> list[torch.Tensor]:
    import torch

    return [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(int(spec.kv_gib))]


def measure_in_turn(spec: Spec, emit: Emit) -> None:
    """Have allocators sleep and wake in turn, with weights or a KV cache each.

    How long that takes depends on the state of the machine and its driver, which here is the same
    for all of them.
    """
    import torch

    torch.zeros(1, device="cuda")
    peers = {peer: open_allocator(peer, _folder(spec)) for peer in spec.among}
    if spec.weights_gib:
        tensor_mib = min(IN_TURN_MIB, int(spec.weights_gib * 1024))
        own = {peer: Weights(tensor_mib * MIB) for peer in peers}
        sleep_in_turn(spec, peers, own, int(spec.weights_gib * 1024 / tensor_mib), emit)
    else:
        _discard_in_turn(spec, peers, emit)
    os._exit(0)  # the pools of the peers do not survive the interpreter


def sleep_in_turn(
    spec: Spec,
    peers: Mapping[str, Allocator],
    weights: Mapping[str, Weights],
    count: int,
    emit: Emit,
    clock: Clock = timed,
) -> None:
    """Resume and suspend so many unchanged weights of each allocator, while all others sleep.

    Raises
    ------
    ContentsLostError
        If the weights are not what they were.
    """
    for peer, allocator in peers.items():
        with allocator.region("weights"):
            weights[peer].allocate(count)
        weights[peer].fill()
        allocator.suspend()
    for number in range(spec.rounds * SLEEP_TIMES):
        for peer in sorted(peers, reverse=bool(number % 2)):
            own = dataclasses.replace(spec, peer=peer)
            emit(own.row("resume", number, clock(peers[peer].resume)))
            weights[peer].check()
            emit(own.row("suspend_clean", number, clock(peers[peer].suspend)))


def _discard_in_turn(spec: Spec, peers: Mapping[str, Allocator], emit: Emit) -> None:
    import torch

    caches = {}
    for peer, allocator in peers.items():
        with allocator.region("kv_cache"):
            caches[peer] = _kv_cache(spec)
    busy = torch.ones(GIB, dtype=torch.uint8, device="cuda")
    for number in range(spec.rounds * KV_TIMES * 2):
        # Whoever is second finds the driver as the first has left it.
        for peer in sorted(peers, reverse=bool(number % 2)):
            for case, call in (
                ("discard_kv", peers[peer].discard_kv),
                ("resume_kv", peers[peer].resume_kv),
            ):
                for _ in range(100):
                    busy.add_(1)
                if case == "resume_kv":
                    time.sleep(ASLEEP_S)
                emit(dataclasses.replace(spec, peer=peer).row(case, number, timed(call)))


def measure_copies(spec: Spec, emit: Emit) -> None:
    """Copy as many bytes as there are weights between pinned and device memory."""
    import torch

    times = max(1, -(-int(spec.weights_gib * MIB) // int(PLAIN_GIB * MIB)))
    size_bytes = int(spec.weights_gib * GIB / times)
    spec = dataclasses.replace(spec, tensor_mib=size_bytes / MIB)
    pairs = []
    for device in range(spec.devices):
        host = torch.ones(size_bytes, dtype=torch.uint8).pin_memory()
        memory = torch.ones(size_bytes, dtype=torch.uint8, device=torch.device("cuda", device))
        pairs.append((host, memory))

    def copy(chosen: list[int], down: bool) -> None:
        for _ in range(times):
            for device in chosen:
                host, memory = pairs[device]
                (host.copy_ if down else memory.copy_)(memory if down else host, non_blocking=True)

    for number in range(-1, spec.rounds):
        for name, chosen in _device_sets(spec.devices).items():
            for case, down in (("suspend_dirty", True), ("resume", False)):
                seconds = timed(partial(copy, chosen, down), spec.devices)
                if number >= 0:  # the one before only makes the machine warm
                    emit(spec.row(case, number, seconds, name))


def measure_two_devices(spec: Spec, emit: Emit) -> None:
    """Suspend and resume the weights of one device while the other's stay, and of both."""
    from sleepbackends.cumem.backend import CumemBackend

    backend = CumemBackend()
    weights = [Weights(int(spec.tensor_mib * MIB), f"cuda:{device}") for device in range(2)]
    for device, each in enumerate(weights):
        with backend.region(f"weights{device}", device):
            each.allocate(int(spec.weights_gib * 1024 / spec.tensor_mib))
        each.fill()
    keep = TagPolicy(Policy.KEEP, Policy.KEEP)
    for number in range(-1, spec.rounds):
        # Both come first: that makes the pinned memory for all that follow.
        for name, chosen in reversed(_device_sets(2).items()):
            for each in weights:
                each.change(number + 1)
            stay = {f"weights{device}": keep for device in range(2) if device not in chosen}
            suspend = partial(backend.suspend, 1, policies=Policies(stay))
            down, up = timed(suspend, 2), timed(backend.resume, 2)
            for each in weights:
                each.check()
            if number >= 0:
                emit(spec.row("suspend_dirty", number, down, name))
                emit(spec.row("resume", number, up, name))
    backend.close()


def _device_sets(devices: int) -> dict[str, list[int]]:
    return {"0": [0]} if devices == 1 else {"0": [0], "1": [1], BOTH_DEVICES: [0, 1]}


def main(arguments: list[str]) -> None:
    """Run what the arguments say."""
    spec, rows = Spec(**json.loads(arguments[0])), Path(arguments[1])

    def emit(row: Row) -> None:
        with rows.open("a") as file:
            file.write(json.dumps(row.to_json()) + "\n")

    if spec.peer == DESCRIBE:
        rows.write_text(json.dumps(describe()) + "\n")
    elif spec.peer == FIRST_TIME:
        touch_host_memory(int(spec.weights_gib * GIB), CudaDriver())
    elif spec.peer == PLAIN_COPY:
        measure_copies(spec, emit)
    elif spec.peer == IN_TURN:
        measure_in_turn(spec, emit)
    elif spec.peer == STAGED:
        measure_staged(spec, emit)
    elif spec.peer == OURS and spec.devices == 2:
        measure_two_devices(spec, emit)
    else:
        measure_allocator(spec, emit)


if __name__ == "__main__":
    end_with_parent()
    main(sys.argv[1:])
