"""The simulated driver checkpoints processes, as the real one was seen to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulators.cuda import Mishap, SharedDevices, Simulator
from tests.simulators.cuda.driving import MIB, Driven, elsewhere, read, write

ME = os.getpid()
CALL = "cuCheckpointProcess"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedDevices]:
    monkeypatch.setenv("SIMULATED_CUDA_SHARED", str(tmp_path / "devices"))
    devices = SharedDevices(tmp_path / "devices")
    yield devices
    devices.close()


@pytest.fixture
def cuda(shared: SharedDevices, simulator: Simulator) -> Driven:
    return Driven()


def state(cuda: Driven, pid: int = ME) -> int:
    return int(cuda.call(f"{CALL}GetState", pid))


def down(cuda: Driven, pid: int = ME) -> None:
    cuda.call(f"{CALL}Lock", pid, None)
    cuda.call(f"{CALL}Checkpoint", pid, None)


def up(cuda: Driven, pid: int = ME) -> None:
    cuda.call(f"{CALL}Restore", pid, None)
    cuda.call(f"{CALL}Unlock", pid, None)


def test_a_process_checkpoints_itself(cuda: Driven, shared: SharedDevices) -> None:
    address = cuda.call("cuMemAlloc", 4 * MIB)
    write(int(address), b"kept")
    assert state(cuda) == 0
    down(cuda)
    assert state(cuda) == 2
    assert shared.used_bytes()[ME] == 0
    up(cuda)
    assert state(cuda) == 0
    assert shared.used_bytes()[ME] == 4 * MIB
    assert read(int(address)) == b"kept"
    assert cuda.call(f"{CALL}GetRestoreThreadId", ME) == ME


def test_without_a_shared_file_it_can_checkpoint_itself(simulator: Simulator) -> None:
    cuda = Driven()
    down(cuda)
    assert state(cuda) == 2
    up(cuda)
    assert cuda.refusal(f"{CALL}GetState", 1) == "NOT_INITIALIZED"


def test_each_step_has_its_state(cuda: Driven) -> None:
    for step in ("Checkpoint", "Restore", "Unlock"):
        assert cuda.refusal(CALL + step, ME, None) == "ILLEGAL_STATE"
    cuda.call(f"{CALL}Lock", ME, None)
    for step in ("Lock", "Restore"):
        assert cuda.refusal(CALL + step, ME, None) == "ILLEGAL_STATE"
    cuda.call(f"{CALL}Checkpoint", ME, None)
    for step in ("Lock", "Checkpoint", "Unlock"):
        assert cuda.refusal(CALL + step, ME, None) == "ILLEGAL_STATE"
    up(cuda)


def test_processes_that_cannot_be(cuda: Driven) -> None:
    assert cuda.refusal(f"{CALL}Lock", 1 << 30, None) == "OPERATING_SYSTEM"
    assert cuda.refusal(f"{CALL}Lock", os.getppid(), None) == "NOT_INITIALIZED"


def test_calls_of_a_locked_process_wait(cuda: Driven) -> None:
    cuda.call(f"{CALL}Lock", ME, None)
    done = threading.Event()

    def use() -> None:
        cuda.call("cuDeviceGetCount")
        done.set()

    thread = threading.Thread(target=use)
    thread.start()
    assert not done.wait(0.05)
    cuda.call(f"{CALL}Unlock", ME, None)
    assert done.wait(5)
    thread.join()


def test_a_lock_waits_for_work_or_times_out(cuda: Driven, simulator: Simulator) -> None:
    simulator.set_on_demand(True)
    address = int(cuda.call("cuMemAlloc", MIB))
    cuda.call("cuMemsetD8Async", address, 1, MIB, 0)
    args = cuda.bindings.CUcheckpointLockArgs()
    args.timeoutMs = 20
    assert cuda.refusal(f"{CALL}Lock", ME, args) == "NOT_READY"
    assert state(cuda) == 0
    cuda.call("cuCtxSynchronize")
    cuda.call(f"{CALL}Lock", ME, args)
    cuda.call(f"{CALL}Unlock", ME, None)


def test_a_restore_without_room_wedges(cuda: Driven, shared: SharedDevices) -> None:
    cuda.call("cuMemAlloc", 4 * MIB)
    down(cuda)
    shared.set_budget_bytes(2 * MIB)
    assert cuda.refusal(f"{CALL}Restore", ME, None) == "OUT_OF_MEMORY"
    shared.set_budget_bytes(None)
    assert cuda.refusal(f"{CALL}Restore", ME, None) == "OPERATING_SYSTEM"
    assert shared.is_wedged(ME)
    shared.put_state(ME, 0)


def test_another_process_is_checkpointed(cuda: Driven, shared: SharedDevices) -> None:
    body = """
address = cuda.call("cuMemAlloc", 2 * MIB)
print("ready", flush=True)
input()
cuda.call("cuMemGetInfo")
print("awake", flush=True)
"""
    with elsewhere(body, shared=shared.path) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "ready\n"
        down(cuda, other.pid)
        assert shared.used_bytes()[other.pid] == 0
        other.stdin.write("\n")
        other.stdin.flush()
        time.sleep(0.05)
        up(cuda, other.pid)
        assert other.stdout.readline() == "awake\n"
    assert cuda.refusal(f"{CALL}GetState", other.pid) == "OPERATING_SYSTEM"


def test_faults_of_a_target(cuda: Driven, shared: SharedDevices) -> None:
    shared.let_fail(ME, "lock", 801)
    assert cuda.refusal(f"{CALL}Lock", ME, None) == "NOT_SUPPORTED"
    cuda.call(f"{CALL}Lock", ME, None)
    shared.let_fail(ME, "checkpoint", 999)
    assert cuda.refusal(f"{CALL}Checkpoint", ME, None) == "UNKNOWN"
    assert state(cuda) == 3, "for good"
    shared.put_state(ME, 0)
    shared.let_fail(ME, "lock", Mishap.TAKES_50_MS)
    started = time.monotonic()
    cuda.call(f"{CALL}Lock", ME, None)
    assert time.monotonic() - started > 0.045
    cuda.call(f"{CALL}Unlock", ME, None)
    assert shared.steps(ME)["unlock"] == 1


def test_injected_faults_work_as_for_every_call(cuda: Driven, simulator: Simulator) -> None:
    simulator.fail(f"{CALL}Lock", 304)
    assert cuda.refusal(f"{CALL}Lock", ME, None) == "OPERATING_SYSTEM"
    assert simulator.calls(f"{CALL}Lock") == 1
