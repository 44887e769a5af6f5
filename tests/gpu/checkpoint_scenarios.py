"""What the checkpoint tests run in processes of their own, as a test may lose one.

``python -m tests.gpu.checkpoint_scenarios SCENARIO ARGUMENTS``. A scenario says where it is on a
line of standard output; where it says that it waits, it goes on after a line of input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sleepbackends import EngineHooks, Orchestrator, SleepConfig
from sleepbackends.checkpoint.backend import TAG
from sleepbackends.errors import CheckpointError, LockTimeoutError

from .helpers import GIB, MIB, holds, pattern, spin


def say(what: str, **found: object) -> None:
    sys.stdout.write(json.dumps({"event": what, **found}) + "\n")
    sys.stdout.flush()


def wait(what: str, **found: object) -> None:
    """Say where it is, and wait for a line."""
    say(what, **found)
    # Read by the file descriptor: nothing may be left in a buffer of Python's.
    while os.read(0, 1) not in (b"\n", b""):
        pass


def open_orchestrator(mode: str, hooks: EngineHooks | None = None, **options: Any) -> Orchestrator:
    parts: dict[str, Any] = {"checkpoint": options} if "+" in mode else options
    return Orchestrator.create(SleepConfig(backend=mode, options=parts), hooks=hooks)


@contextmanager
def region(orchestrator: Orchestrator, tag: str) -> Iterator[None]:
    """A region where the backend has them; plain memory otherwise."""
    backend: Any = orchestrator.backend
    if hasattr(backend, "region"):
        with backend.region(tag):
            yield
    else:
        yield


class Workload:
    """Captured graphs, streams, events, a compiled function, a Triton kernel, and bytes."""

    def __init__(self, orchestrator: Orchestrator, size_bytes: int) -> None:
        from .triton_kernel import add_one

        with region(orchestrator, "weights"):
            self.weights = pattern(size_bytes, 1)
            self.matrix = torch.randn(512, 512, device="cuda")
        with region(orchestrator, "kv_cache"):
            self.kv_cache = torch.zeros(size_bytes // 4, dtype=torch.int32, device="cuda")
        self.plain = pattern(64 * MIB, 2)
        self.given = torch.randn(512, 512, device="cuda")
        untyped: Any = torch.cuda
        self.stream = untyped.Stream()
        self.event = untyped.Event(enable_timing=True)
        self.compiled = torch.compile(lambda x: torch.nn.functional.gelu(x @ x) + 1)
        self.add_one = add_one
        self.result = torch.empty_like(self.given)
        self.warm_up()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            torch.mm(self.matrix, self.given, out=self.result)
        self.graph.replay()
        self.expected = self.compute()

    def warm_up(self) -> None:
        torch.mm(self.matrix, self.given, out=self.result)
        torch.cuda.synchronize()

    def compute(self) -> list[torch.Tensor]:
        self.result.zero_()
        self.graph.replay()
        with torch.cuda.stream(self.stream):
            self.stream.wait_stream(torch.cuda.default_stream())
            on_stream = self.matrix * 2
            self.event.record()
        self.event.synchronize()
        outcomes = [
            self.result.clone(),
            on_stream,
            self.compiled(self.given),
            self.add_one(self.given),
        ]
        torch.cuda.synchronize()
        return [outcome.cpu() for outcome in outcomes]

    def check(self) -> None:
        found = self.compute()
        for got, wanted in zip(found, self.expected, strict=True):
            assert torch.equal(got, wanted)
        assert holds(self.weights, 1), "the weights changed"
        assert holds(self.plain, 2), "memory that nobody manages changed"


def cycles(mode: str, helper: str, count: str) -> None:
    """Must-show: 20 cycles, and everything works after each."""
    orchestrator = open_orchestrator(mode, helper=helper == "helper")
    work = Workload(orchestrator, 128 * MIB)
    wait("awake")
    down, up = [], []
    for number in range(int(count)):
        started = time.perf_counter()
        orchestrator.sleep(1)
        slept = time.perf_counter()
        if number == 0:
            wait("asleep")
        woken = time.perf_counter()
        assert orchestrator.wake_up().serving
        up.append(time.perf_counter() - woken)
        down.append(slept - started)
        work.check()
    say("seconds", down=median(down), up=median(up))
    work.kv_cache.add_(1)
    torch.cuda.synchronize()
    orchestrator.close()
    say("done")


def release(mode: str) -> None:
    """Must-show: the KV cache is released by a full suspend, with the weights intact."""
    calls: list[str] = []
    cache: list[torch.Tensor] = []

    def drop_caches(tags: frozenset[str]) -> None:
        calls.append("drop_caches " + ",".join(sorted(tags)))
        for tensor in cache:
            tensor.zero_()

    hooks = EngineHooks(
        quiesce=lambda mode, deadline_s: calls.append("quiesce"),
        unquiesce=lambda: calls.append("unquiesce"),
        drop_caches=drop_caches,
    )
    orchestrator = open_orchestrator(mode, hooks)
    weights = pattern(256 * MIB, 3)
    cache.append(torch.full((64 << 20,), 7, dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()
    plan = orchestrator.plan_release()
    assert plan.strategy is not None
    wait("awake", strategy=plan.strategy.value, degraded=plan.degraded)
    report = orchestrator.release_kv_cache()
    wait("asleep", degraded=report.degraded, reason=report.reason)
    before_wake = list(calls)
    assert orchestrator.wake_up().serving
    assert holds(weights, 3)
    assert not cache[0].any()
    say("done", before_wake=before_wake, calls=calls)


def launching() -> None:
    """Must-show: another thread that launches kernels all the time."""
    orchestrator = open_orchestrator("checkpoint", lock_timeout_s=10.0)
    total = torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
    launched, stop = [0], threading.Event()

    def work() -> None:
        while not stop.is_set():
            total.add_(1)
            launched[0] += 1
            if launched[0] % 64 == 0:
                torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    backend = orchestrator.backend
    for _ in range(3):
        time.sleep(0.05)
        backend.suspend(1)
        at_sleep = launched[0]
        time.sleep(0.2)
        assert launched[0] - at_sleep <= 64, "kernels were launched while it slept"
        backend.resume()
        time.sleep(0.05)
        assert launched[0] > at_sleep
    stop.set()
    thread.join(30)
    torch.cuda.synchronize()
    assert (total == launched[0]).all(), "a launch was lost"
    say("waited", launched=launched[0])
    torch.cuda.synchronize()
    impatient = open_orchestrator("checkpoint", lock_timeout_s=0.2)
    impatient.backend.resume()  # nothing to do, but its helper is there then
    spin(4_000_000_000)  # about two seconds
    total.add_(1)
    started = time.perf_counter()
    try:
        impatient.backend.suspend(1)
    except LockTimeoutError as error:
        say("timed_out", seconds=time.perf_counter() - started, states=list(error.states.values()))
    else:
        say("not_timed_out", seconds=time.perf_counter() - started)
        impatient.backend.resume()
    torch.cuda.synchronize()
    assert (total == launched[0] + 1).all()
    impatient.backend.suspend(1)
    impatient.backend.resume()
    assert (total == launched[0] + 1).all()
    impatient.close()
    orchestrator.close()
    say("done")


def kept() -> None:
    """Memory of cumem's that a policy keeps mapped is the driver's to save."""
    config = SleepConfig(backend="cumem+checkpoint", policies={"weights": "keep"})
    orchestrator = Orchestrator.create(config)
    with region(orchestrator, "weights"):
        weights = pattern(128 * MIB, 9)
    with region(orchestrator, "kv_cache"):
        cache = pattern(128 * MIB, 10)
    wait("awake")
    try:
        orchestrator.sleep(1)
    except CheckpointError as error:
        say("refused", message=error.message)
    else:
        wait("asleep")
    assert orchestrator.wake_up().serving
    assert holds(weights, 9)
    assert not cache.any()
    orchestrator.close()
    say("done")


def helper_killed() -> None:
    """Must-show: the helper is killed while the process sleeps."""
    orchestrator = open_orchestrator("checkpoint")
    backend: Any = orchestrator.backend
    tensor = pattern(64 * MIB, 4)
    torch.cuda.synchronize()
    backend.suspend(1)
    os.kill(backend.helper_pid, 9)
    wait("asleep", by="another process")  # woken from outside
    assert holds(tensor, 4)
    assert not backend.resume().changed
    backend.suspend(1)
    os.kill(backend.helper_pid, 9)
    assert backend.resume().changed
    assert holds(tensor, 4)
    say("done")


def managed() -> None:
    """What the driver refuses is reported as such, with the process still usable."""
    import ctypes

    orchestrator = open_orchestrator("checkpoint")
    tensor = pattern(16 * MIB, 5)
    cuda = ctypes.CDLL("libcuda.so.1")
    address = ctypes.c_uint64()
    code = cuda.cuMemAllocManaged(ctypes.byref(address), ctypes.c_size_t(MIB), 1)
    assert code == 0, code
    try:
        orchestrator.backend.suspend(1)
    except CheckpointError as error:
        say("refused", message=error.message, step=error.step, states=list(error.states.values()))
    else:
        say("not_refused")
        orchestrator.backend.resume()
    assert holds(tensor, 5)
    assert cuda.cuMemFree_v2(address) == 0
    try:
        orchestrator.backend.suspend(1)
        orchestrator.backend.resume()
    except CheckpointError as error:
        # Driver 580 does not forget that there was managed memory once.
        say("refused_again", message=error.message, states=list(error.states.values()))
    assert holds(tensor, 5)
    tensor.copy_(pattern(16 * MIB, 6))
    assert holds(tensor, 6)
    say("done")


def measures_asleep() -> None:
    """A process that sleeps waits in the management library, and another one answers for it."""
    from sleepbackends.checkpoint.device_memory import DeviceMonitor
    from sleepbackends.checkpoint.measuring import OutsideMonitor

    orchestrator = open_orchestrator("checkpoint")
    tensor = pattern(64 * MIB, 11)
    monitor = DeviceMonitor()
    device = monitor.devices[0]
    used = monitor.measure([device])[device].used_bytes
    orchestrator.backend.suspend(1)
    itself = threading.Thread(target=monitor.measure, args=[[device]])
    itself.start()
    fell = used - OutsideMonitor().measure([device])[device].used_bytes
    itself.join(3.0)
    waited = itself.is_alive()
    orchestrator.backend.resume()
    itself.join(30.0)
    assert not itself.is_alive()
    assert holds(tensor, 11)
    say("done", fell=fell, waited=waited)


def exits_asleep(mode: str) -> None:
    """The interpreter ends while the process is asleep."""
    orchestrator = open_orchestrator(mode)
    tensor = pattern(16 * MIB, 6)
    torch.cuda.synchronize()
    orchestrator.sleep(1)
    say("done", bytes=tensor.nbytes)


def held(size_gib: str) -> None:
    """A process that holds so much, for the check of room."""
    orchestrator = open_orchestrator("checkpoint")
    tensor = pattern(int(size_gib) * GIB, 7)
    torch.cuda.synchronize()
    orchestrator.backend.suspend(1)
    wait("asleep")
    from sleepbackends.errors import DeviceMemoryError

    try:
        orchestrator.backend.resume()
    except DeviceMemoryError as error:
        wait("no_room", needed=error.needed_bytes, available=error.available_bytes)
        orchestrator.backend.resume()
    assert holds(tensor, 7)
    say("done", tag=TAG)


def nccl(mode: str, rank: str, folder: str) -> None:
    """Must-show: one of two ranks, suspended and resumed together by rank 0."""
    import torch.distributed

    from sleepbackends.checkpoint.communicators import NcclCommunicators
    from sleepbackends.errors import CheckpointRefusedError

    number, dist = int(rank), _untyped(torch.distributed)
    torch.cuda.set_device(number)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("nccl", store=store, rank=number, world_size=2)
    tensor = pattern(64 * MIB, 8 + number, number)

    def reduce() -> int:
        value = torch.full((1 << 20,), number + 1, device=f"cuda:{number}")
        dist.all_reduce(value)
        return int(value.sum().item()) // (1 << 20)

    before = reduce()
    torch.cuda.synchronize()
    wait("ready", pid=os.getpid(), sum=before)
    if number == 0:
        other = int(Path(folder, "pid").read_text())
        orchestrator = open_orchestrator("checkpoint", processes=(other,))
        backend: Any = orchestrator.backend
        try:
            backend.suspend(1)
        except CheckpointRefusedError as error:
            say("refused", message=error.message)
        hooks = NcclCommunicators(mode, backend=backend)  # type: ignore[arg-type]  # from argv
    else:
        hooks = NcclCommunicators(mode)  # type: ignore[arg-type]  # from argv
    for _ in range(2):
        hooks.teardown()
        if number == 0:
            wait("torn_down", mode=hooks.mode)
            backend.suspend(1)
            wait("asleep")
            backend.resume()
            say("awake")
        else:
            wait("torn_down", mode=hooks.mode)  # until rank 0 has woken both
        hooks.rebuild()
        say("after", sum=reduce(), intact=holds(tensor, 8 + number))
    dist.destroy_process_group()
    say("done")


def _untyped(module: Any) -> Any:
    return module


SCENARIOS: dict[str, Callable[..., None]] = {
    "cycles": cycles,
    "release": release,
    "launching": launching,
    "kept": kept,
    "helper_killed": helper_killed,
    "managed": managed,
    "exits_asleep": exits_asleep,
    "measures_asleep": measures_asleep,
    "held": held,
    "nccl": nccl,
}


if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](*sys.argv[2:])
