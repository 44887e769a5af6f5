"""The backend in a process that has a context on the simulated driver."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.availability import Availability
from sleepbackends.checkpoint import backend as module
from sleepbackends.checkpoint import durable, room
from sleepbackends.checkpoint.backend import TAG, CheckpointBackend
from sleepbackends.checkpoint.client import HelperClient
from sleepbackends.checkpoint.device_memory import DeviceMemory
from sleepbackends.checkpoint.measuring import OutsideMonitor
from sleepbackends.checkpoint.options import CheckpointOptions
from sleepbackends.checkpoint.states import ProcessState
from sleepbackends.checkpoint.waking import wake
from sleepbackends.control import Control
from sleepbackends.errors import (
    BackendUnavailableError,
    BusyError,
    CheckpointError,
    CheckpointRefusedError,
    DeviceMemoryError,
    HelperError,
    HostMemoryError,
    LockTimeoutError,
    PolicyConflictError,
    ProcessLostError,
    UnsupportedOperationError,
)
from sleepbackends.host_limits import HostMemory
from sleepbackends.orchestrator import Orchestrator
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.residency import Residency
from sleepbackends.settings import BackendSettings
from sleepbackends.testing import FakeEngine
from tests.checkpoint.conftest import MIB, SIZE, Sleepers
from tests.simulators.cuda import Mishap, SharedDevices, Simulator
from tests.simulators.cuda.driving import Driven, read, write

ME = os.getpid()
OUT_OF_MEMORY, NOT_SUPPORTED = 2, 801
Make = Callable[..., CheckpointBackend]


@pytest.fixture
def address(simulator: Simulator) -> int:
    """Plain memory of this process on the first device."""
    cuda = Driven()
    address = int(cuda.call("cuMemAlloc", SIZE))
    write(address, b"weights")
    return address


@pytest.fixture
def make(address: int, devices: SharedDevices, runtime: Path) -> Iterator[Make]:
    opened: list[CheckpointBackend] = []

    def make(settings: BackendSettings | None = None, **options: Any) -> CheckpointBackend:
        given = {"runtime_directory": runtime, "device_margin_bytes": 0, **options}
        opened.append(CheckpointBackend(CheckpointOptions(**given), settings))
        return opened[-1]

    yield make
    devices.set_budget_bytes(None)
    devices.put_state(ME, 0)
    for backend in opened:
        backend.close()
    assert gc.isenabled()


def residency(backend: CheckpointBackend) -> Residency:
    (only,) = backend.state().tags[TAG].residencies
    return only


@pytest.mark.parametrize("helper", [True, False])
def test_a_cycle(make: Make, address: int, devices: SharedDevices, helper: bool) -> None:
    backend = make(helper=helper)
    report = backend.suspend(1)
    assert report.changed
    assert report.released_bytes == SIZE
    assert report.copied_bytes == SIZE
    assert devices.used_bytes()[ME] == 0
    assert devices.checkpoint_state(ME) == 2
    assert residency(backend) is Residency.OFFLOADED
    assert not gc.isenabled()
    assert not backend.suspend(1).changed
    woken = backend.resume()
    assert woken.changed
    assert gc.isenabled()
    assert residency(backend) is Residency.RESIDENT
    assert devices.used_bytes()[ME] == SIZE
    assert read(address, 7) == b"weights"
    assert not backend.resume().changed


def test_calls_of_the_process_wait_while_it_sleeps(make: Make) -> None:
    backend, cuda = make(helper=False), Driven()
    backend.suspend(1)
    done = threading.Event()

    def use() -> None:
        cuda.call("cuCtxSetCurrent", cuda.contexts[0])
        done.set()

    thread = threading.Thread(target=use)
    thread.start()
    assert not done.wait(0.05)
    backend.resume()
    assert done.wait(5)
    thread.join()


def test_levels_and_policies(make: Make) -> None:
    backend = make(helper=False)
    assert not backend.suspend(0).changed
    keep = Policies({TAG: TagPolicy(Policy.KEEP, Policy.KEEP)})
    assert not backend.suspend(2, policies=keep).changed
    drop = Policies({TAG: TagPolicy(Policy.DISCARD, Policy.DISCARD)})
    with pytest.raises(PolicyConflictError, match="cannot be dropped"):
        backend.suspend(1, policies=drop)
    with pytest.raises(UnsupportedOperationError, match="supports_selective_release"):
        backend.discard([TAG])
    assert backend.suspend(2).changed
    backend.resume()


def test_release_of_the_kv_cache_is_a_full_suspend(make: Make, devices: SharedDevices) -> None:
    engine = FakeEngine()
    orchestrator = Orchestrator(make(helper=False), hooks=engine.hooks())
    plan = orchestrator.plan_release()
    assert plan.strategy is not None
    assert plan.strategy.value == "full_suspend"
    assert plan.degraded
    assert plan.releases_device_context
    report = orchestrator.release_kv_cache()
    assert report.degraded
    assert devices.used_bytes()[ME] == 0
    assert engine.named() == ["quiesce", "teardown_communicators"]
    assert orchestrator.wake_up().serving
    names = ["drop_caches", "rebuild_communicators", "recapture_graphs", "unquiesce"]
    assert engine.named() == names


# What is refused or fails


def test_a_lock_that_times_out(make: Make, devices: SharedDevices) -> None:
    backend = make(lock_timeout_s=0.05)
    devices.set_busy(ME, True)
    with pytest.raises(LockTimeoutError) as caught:
        backend.suspend(1)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.recoverable
    assert not caught.value.report.changed
    assert caught.value.states == {ME: "running"}
    assert gc.isenabled()
    devices.set_busy(ME, False)
    backend.suspend(1)
    backend.resume()


def test_the_deadline_of_the_call_counts(make: Make, devices: SharedDevices) -> None:
    backend = make(helper=False, lock_timeout_s=60.0)
    started = time.monotonic()
    backend.suspend(1)
    backend.resume()
    usual_s = time.monotonic() - started  # other processes measure before anything is locked
    devices.set_busy(ME, True)
    started = time.monotonic()
    with pytest.raises(LockTimeoutError):
        backend.suspend(1, control=Control(timeout_s=1 + 3 * usual_s))
    assert time.monotonic() - started < 30


def test_a_checkpoint_that_fails_is_undone(make: Make, devices: SharedDevices) -> None:
    backend = make()
    devices.let_fail(ME, "checkpoint", NOT_SUPPORTED)
    with pytest.raises(CheckpointError, match="managed memory") as caught:
        backend.suspend(1)
    assert caught.value.step == "checkpoint"
    assert caught.value.recoverable
    assert residency(backend) is Residency.RESIDENT
    backend.suspend(1)
    backend.resume()


def test_too_little_device_memory_is_seen_before_the_restore(
    make: Make, devices: SharedDevices
) -> None:
    backend = make(BackendSettings(wait_for_memory_s=0.1))
    backend.suspend(1)
    devices.set_budget_bytes(SIZE - 1)
    with pytest.raises(DeviceMemoryError) as caught:
        backend.resume()
    assert caught.value.needed_bytes == SIZE
    assert caught.value.available_bytes == SIZE - 1
    assert devices.steps(ME)["restore"] == 0
    assert residency(backend) is Residency.OFFLOADED
    devices.set_budget_bytes(None)
    backend.resume()


def test_a_restore_that_runs_out_of_memory_loses_the_process(
    make: Make, devices: SharedDevices
) -> None:
    backend = make(helper=False)
    backend.suspend(1)
    devices.let_fail(ME, "restore", OUT_OF_MEMORY)
    for _ in range(2):
        with pytest.raises(ProcessLostError) as caught:
            backend.resume()
        assert not caught.value.recoverable
        assert caught.value.states == {ME: "checkpointed"}
        assert residency(backend) is Residency.OFFLOADED


def test_an_unlock_that_fails_is_repeated_by_the_next_call(
    make: Make, devices: SharedDevices
) -> None:
    backend = make(helper=False)
    backend.suspend(1)
    devices.let_fail(ME, "unlock", NOT_SUPPORTED)
    with pytest.raises(CheckpointError, match="resume") as caught:
        backend.resume()
    assert caught.value.states == {ME: "locked"}
    assert residency(backend) is Residency.OFFLOADED
    backend.resume()
    assert devices.steps(ME)["restore"] == 1


def test_too_little_host_memory(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make(helper=False)
    monkeypatch.setattr(room, "host_memory", lambda: HostMemory(SIZE, None, "machine"))
    with pytest.raises(HostMemoryError) as caught:
        backend.suspend(1)
    assert caught.value.needed_bytes == round(SIZE * 1.1)
    assert not caught.value.report.changed


def test_live_communicators_are_refused_before_the_lock(make: Make, devices: SharedDevices) -> None:
    backend = make(helper=False)
    backend.communicators = lambda: ["default"]
    with pytest.raises(CheckpointRefusedError, match="live NCCL"):
        backend.suspend(1)
    assert devices.steps(ME)["lock"] == 0


def test_a_process_without_a_context(
    simulator: Simulator, devices: SharedDevices, runtime: Path
) -> None:
    backend = CheckpointBackend(CheckpointOptions(runtime_directory=runtime, helper=False))
    assert not backend.resume().changed
    with pytest.raises(CheckpointRefusedError, match="no CUDA context"):
        backend.suspend(1)
    backend.close()


@pytest.mark.parametrize("split", [True, False], ids=["a split device", "an instance"])
def test_instances_of_a_device_are_refused(
    make: Make,
    devices: SharedDevices,
    monkeypatch: pytest.MonkeyPatch,
    split: bool,
) -> None:
    def measure(_: OutsideMonitor, devices: Collection[str]) -> dict[str, DeviceMemory]:
        found = DeviceMemory(SIZE, SIZE, is_partitioned=True)
        return dict.fromkeys(devices, found) if split else {}

    monkeypatch.setattr(OutsideMonitor, "measure", measure)
    backend = make(helper=False)
    with pytest.raises(CheckpointRefusedError, match="instances"):
        backend.suspend(1)
    assert devices.steps(ME)["lock"] == 0


def test_a_wake_up_that_is_refused_is_made_good_at_the_end(
    make: Make, devices: SharedDevices
) -> None:
    backend = make(helper=False)
    backend.suspend(1)
    devices.set_budget_bytes(SIZE - 1)
    with pytest.raises(DeviceMemoryError):
        backend.resume()
    devices.set_budget_bytes(None)
    backend.close()
    assert devices.checkpoint_state(ME) == 0


def test_somebody_else_has_put_the_process_to_sleep(make: Make, devices: SharedDevices) -> None:
    backend = make()
    devices.put_state(ME, 2)
    with pytest.raises(BusyError, match="somebody else"):
        backend.suspend(1)
    devices.put_state(ME, 0)
    backend.suspend(1)
    backend.resume()


def test_somebody_else_has_woken_the_process(make: Make, devices: SharedDevices) -> None:
    backend = make(helper=False)
    backend.suspend(1)
    devices.put_state(ME, 0)
    assert not backend.resume().changed
    assert residency(backend) is Residency.RESIDENT
    assert gc.isenabled()


# Helpers that die


KILLED: list[tuple[str, str, Mishap]] = [
    ("suspend", step, how)
    for step in ("lock", "checkpoint")
    for how in (Mishap.CALLER_DIES_BEFORE, Mishap.CALLER_DIES_AFTER)
] + [
    ("resume", step, how)
    for step in ("restore", "unlock")
    for how in (Mishap.CALLER_DIES_BEFORE, Mishap.CALLER_DIES_AFTER)
]


@pytest.mark.parametrize(("verb", "step", "how"), KILLED, ids=lambda value: str(value))
def test_a_helper_that_is_killed_at_a_step(
    make: Make, devices: SharedDevices, address: int, verb: str, step: str, how: Mishap
) -> None:
    """A suspend is undone, a resume goes on: by a new helper, from what it finds."""
    backend = make()
    if verb == "suspend":
        devices.let_fail(ME, step, how)
        with pytest.raises(HelperError, match="died") as caught:
            backend.suspend(1)
        assert caught.value.recoverable
        assert caught.value.states == {ME: "running"}
        assert residency(backend) is Residency.RESIDENT
        assert gc.isenabled()
        backend.suspend(1)
    else:
        backend.suspend(1)
        devices.let_fail(ME, step, how)
    assert backend.resume().changed
    assert devices.checkpoint_state(ME) == 0
    assert devices.used_bytes()[ME] == SIZE
    assert read(address, 7) == b"weights"


def test_a_process_whose_helper_is_gone_wakes_itself_as_another_would(
    make: Make, devices: SharedDevices, runtime: Path
) -> None:
    backend = make()
    backend.suspend(1)
    assert backend.helper_pid is not None
    os.kill(backend.helper_pid, signal.SIGKILL)
    assert wake(ME, runtime).by == "this process"
    assert devices.checkpoint_state(ME) == 0


def test_a_helper_that_is_killed_over_a_question(make: Make, devices: SharedDevices) -> None:
    backend = make()
    for call in (backend.suspend, backend.resume):
        devices.let_fail(ME, "state", Mishap.CALLER_DIES_BEFORE)
        assert call().changed


@pytest.mark.parametrize("step", ["lock", "checkpoint", "restore", "unlock"])
def test_a_helper_that_is_killed_between_two_processes(
    make: Make, devices: SharedDevices, sleepers: Sleepers, step: str
) -> None:
    others = sleepers(2)
    backend = make(processes=tuple(target.pid for target in others))
    if step in ("lock", "checkpoint"):
        devices.let_fail(others[0].pid, step, Mishap.CALLER_DIES_AFTER)
        with pytest.raises(HelperError):
            backend.suspend(1)
        assert set(backend.process_states().values()) == {ProcessState.RUNNING}
        backend.suspend(1)
    else:
        backend.suspend(1)
        devices.let_fail(others[0].pid, step, Mishap.CALLER_DIES_AFTER)
    backend.resume()
    assert set(backend.process_states().values()) == {ProcessState.RUNNING}
    assert sum(devices.used_bytes().values()) == 3 * SIZE


def test_a_helper_that_is_killed_while_the_process_sleeps(
    make: Make, devices: SharedDevices
) -> None:
    backend = make()
    backend.suspend(1)
    helper = backend.helper_pid
    assert helper is not None
    os.kill(helper, signal.SIGKILL)
    assert backend.resume().changed
    assert backend.helper_pid != helper


@pytest.mark.parametrize("verb", ["suspend", "resume"])
def test_a_helper_that_hangs_is_killed(
    make: Make, devices: SharedDevices, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr("sleepbackends.checkpoint.caller.deadline_s", lambda *_: 1.0)
    backend = make()
    if verb == "suspend":
        devices.let_fail(ME, "checkpoint", Mishap.HANGS)
        with pytest.raises(HelperError, match="did not answer"):
            backend.suspend(1)
        assert devices.checkpoint_state(ME) == 0
    else:
        backend.suspend(1)
        devices.let_fail(ME, "restore", Mishap.HANGS)
        assert backend.resume().changed


def test_without_helpers_the_process_wakes_itself(
    make: Make, devices: SharedDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_helper(_: HelperClient) -> None:
        raise BackendUnavailableError("none can be started")

    backend = make()
    backend.suspend(1)
    helper = backend.helper_pid
    assert helper is not None
    os.kill(helper, signal.SIGKILL)
    monkeypatch.setattr(HelperClient, "start", no_helper)
    assert backend.resume().changed


def test_without_any_process_to_measure_it_stays_asleep(
    make: Make, devices: SharedDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore that runs out of memory cannot be repeated, so room is not taken for granted."""
    backend = make(helper=False)
    backend.suspend(1)
    with monkeypatch.context() as patched:
        patched.setattr("sys.executable", "/nonexistent")
        with pytest.raises(BackendUnavailableError, match="resume --pid") as caught:
            backend.resume()
    assert "nonexistent" in caught.value.message
    assert devices.checkpoint_state(ME) == 2
    assert backend.resume().changed


# Several processes


def test_processes_that_sleep_together(
    make: Make, devices: SharedDevices, sleepers: Sleepers
) -> None:
    others = sleepers(2)
    backend = make(processes=tuple(target.pid for target in others))
    report = backend.suspend(1)
    assert report.released_bytes == 3 * SIZE
    assert sum(devices.used_bytes().values()) == 0
    assert set(backend.process_states().values()) == {ProcessState.CHECKPOINTED}
    backend.resume()
    assert sum(devices.used_bytes().values()) == 3 * SIZE


def test_one_that_dies_asleep(make: Make, devices: SharedDevices, sleepers: Sleepers) -> None:
    (other,) = sleepers(1)
    backend = make(processes=(other.pid,))
    backend.suspend(1)
    os.kill(other.pid, signal.SIGKILL)
    while other.is_alive():
        time.sleep(0.001)
    with pytest.raises(ProcessLostError, match=f"{other.pid} is gone"):
        backend.resume()
    assert devices.checkpoint_state(ME) == 2


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
def test_one_that_dies_during_the_call(
    make: Make, devices: SharedDevices, sleepers: Sleepers, runtime: Path, step: str
) -> None:
    (other,) = sleepers(1)
    backend = make(processes=(other.pid,))
    devices.let_fail(other.pid, step, Mishap.TARGET_DIES)
    with pytest.raises(ProcessLostError) as caught:
        backend.suspend(1)
    assert caught.value.states[other.pid] == "gone"
    assert not caught.value.recoverable
    assert residency(backend) is Residency.OFFLOADED, "this one is not let loose"
    assert wake(ME, runtime, force=True).states[ME] is ProcessState.RUNNING


def test_a_controller_that_does_not_sleep_itself(
    make: Make, devices: SharedDevices, sleepers: Sleepers
) -> None:
    (other,) = sleepers(1)
    backend = make(processes=(other.pid,), include_self=False)
    assert backend.suspend(1).released_bytes == SIZE
    assert devices.used_bytes()[ME] == SIZE
    backend.resume()


def test_closing_wakes_the_process(make: Make, devices: SharedDevices) -> None:
    for helper in (True, False):
        backend = make(helper=helper)
        backend.suspend(1)
        backend.close()
        assert devices.checkpoint_state(ME) == 0
        assert devices.used_bytes()[ME] == SIZE


@pytest.mark.parametrize("reserved_bytes", [0, MIB, 100 * SIZE])
def test_room_is_measured_where_nothing_tells_what_a_process_uses(
    make: Make,
    devices: SharedDevices,
    sleepers: Sleepers,
    monkeypatch: pytest.MonkeyPatch,
    reserved_bytes: int,
) -> None:
    """In a container the numbers of processes may be the host's.

    What torch reserved may be unmapped; what everybody uses is the most that it can be.
    """
    measure = OutsideMonitor.measure

    def without_processes(
        monitor: OutsideMonitor, devices: Collection[str]
    ) -> dict[str, DeviceMemory]:
        found = measure(monitor, devices)
        return {uuid: replace(memory, processes={}) for uuid, memory in found.items()}

    monkeypatch.setattr(OutsideMonitor, "measure", without_processes)
    monkeypatch.setattr(module, "torch_reserved_bytes", lambda: reserved_bytes)
    backend = make(helper=False)
    (neighbour,) = sleepers(1)
    assert backend.suspend(1).released_bytes == min(reserved_bytes or 2 * SIZE, 2 * SIZE)
    devices.forget(neighbour.pid)
    devices.set_budget_bytes(SIZE - MIB)
    with pytest.raises(DeviceMemoryError) as caught:
        backend.resume()
    assert caught.value.needed_bytes == SIZE
    devices.set_budget_bytes(None)
    backend.resume()


# Durable storage


def test_saving_is_refused_with_the_reason(make: Make, tmp_path: Path) -> None:
    backend = make(helper=False)
    backend.durability = Availability(False, "CRIU is missing", "install it")
    with pytest.raises(UnsupportedOperationError, match="CRIU is missing"):
        backend.save_to(tmp_path)
    backend.durability = Availability(True)
    with pytest.raises(PolicyConflictError, match="awake"):
        backend.save_to(tmp_path)


@pytest.mark.parametrize("works", [True, False])
def test_the_flag_follows_criu(make: Make, monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    monkeypatch.setattr(durable, "probe", lambda: Availability(works, "so it is"))
    backend = make(helper=False)
    assert backend.capabilities.supports_durable_storage is works
    assert backend.durability.reason == "so it is"
    assert Orchestrator(backend).plan_sleep(1).survives_exit is works


@pytest.mark.parametrize("restored", [False, True])
def test_a_saved_process_goes_on(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: bool
) -> None:
    """Where it was saved and where it was restored, it is asleep and can be woken."""
    backend = make()
    backend.durability = Availability(True)
    backend.suspend(1)
    helper = backend.helper_pid

    def save(directory: Path, *_: object) -> durable.Saved:
        assert backend.helper_pid is None, "a child would have to be saved as well"
        return durable.Saved(directory, restored, 0.1)

    monkeypatch.setattr(durable, "save", save)
    assert backend.save_to(tmp_path).restored is restored
    assert backend.resume().changed
    assert backend.helper_pid not in (None, helper)
