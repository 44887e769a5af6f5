"""Process checkpoints on a GPU: each in a process of its own, watched from this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sleepbackends.checkpoint.backend import CheckpointBackend
from sleepbackends.checkpoint.device_memory import DeviceMonitor
from sleepbackends.checkpoint.driver import CheckpointDriver

from .helpers import GIB, MIB, free_device_bytes, let_go, neighbour

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 150.0
SLACK = 8 * MIB
"""What a device that nobody uses may differ by."""

_found = CheckpointBackend.probe()
pytestmark = [
    pytest.mark.skipif(not _found.ok, reason=f"{_found.reason} ({_found.hint})"),
    pytest.mark.timeout(TIMEOUT_S + 30),
]


class Child:
    """A scenario that runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[dict[str, Any]] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    def until(self, event: str) -> dict[str, Any]:
        """Read on to an event; fail with what was said if it does not come."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith('{"event"'):
                continue
            self.said.append(json.loads(line))
            if self.said[-1]["event"] == event:
                return self.said[-1]
        raise AssertionError(f"no {event!r} after {self.said}, exit code {self.process.wait()}")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ends_well(self) -> dict[str, Any]:
        last = self.until("done")
        assert self.process.wait(60) == 0
        return last


@contextmanager
def scenario(name: str, *arguments: str, **env: str) -> Iterator[Child]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.checkpoint_scenarios", name, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **env},
    )
    with process:
        try:
            yield Child(process)
        finally:
            process.kill()  # which is safe, asleep or not


@pytest.fixture(scope="module")
def monitor() -> DeviceMonitor:
    return DeviceMonitor()


@pytest.fixture
def used(monitor: DeviceMonitor) -> Any:
    """How much more of the first device is in use than when the test began, and by whom."""
    torch.cuda.synchronize()
    (device,) = CheckpointDriver().devices_in_use()[:1]
    before = monitor.measure([device])[device].used_bytes

    def measure(pid: int) -> int:
        found = monitor.measure([device])[device]
        return max(found.used_bytes - before, found.processes.get(pid, 0))

    return measure


@pytest.mark.parametrize(
    ("mode", "helper", "cycles"),
    [("checkpoint", "helper", 20), ("checkpoint", "self", 5), ("cumem+checkpoint", "helper", 20)],
)
def test_everything_works_after_many_cycles(mode: str, helper: str, cycles: int, used: Any) -> None:
    with scenario("cycles", mode, helper, str(cycles)) as child:
        child.until("awake")
        assert used(child.pid) > 300 * MIB
        child.go_on()
        child.until("asleep")
        assert used(child.pid) <= SLACK, "the whole GPU is given back"
        child.go_on()
        seconds = child.until("seconds")
        sys.stdout.write(f"{mode}, {helper}: {seconds}\n")
        child.ends_well()


def test_a_release_of_the_kv_cache_on_plain_checkpoint(used: Any) -> None:
    with scenario("release", "checkpoint") as child:
        planned = child.until("awake")
        assert planned["strategy"] == "full_suspend"
        assert planned["degraded"]
        child.go_on()
        report = child.until("asleep")
        assert report["degraded"]
        assert "wake_up" in report["reason"]
        assert used(child.pid) <= SLACK
        child.go_on()
        last = child.ends_well()
        assert last["before_wake"] == ["quiesce"]
        assert last["calls"] == ["quiesce", "drop_caches kv_cache", "unquiesce"]


def test_a_thread_that_launches_kernels_all_the_time() -> None:
    with scenario("launching") as child:
        assert child.until("waited")["launched"] > 0
        timed_out = child.until("timed_out")
        assert timed_out["states"] == ["running"]
        assert timed_out["seconds"] < 2
        child.ends_well()


def test_a_sleeping_process_has_devices_measured_by_another() -> None:
    with scenario("measures_asleep") as child:
        found = child.ends_well()
        assert found["fell"] > 64 * MIB
        assert found["waited"], "it could ask for itself"


def test_a_helper_that_is_killed_while_the_process_sleeps() -> None:
    with scenario("helper_killed") as child:
        child.until("asleep")
        code = "from sleepbackends.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, "resume", "--pid", str(child.pid), "--json"],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        woken = json.loads(done.stdout)
        assert woken["changed"]
        assert woken["states"] == {str(child.pid): "running"}
        child.go_on()
        child.ends_well()


def test_what_the_driver_refuses_leaves_the_process_usable() -> None:
    with scenario("managed") as child:
        child.ends_well()
        sys.stdout.write(f"managed memory: {child.said}\n")
        refusals = [said for said in child.said if said["event"].startswith("refused")]
        assert all(said["states"] == ["running"] for said in refusals)
        assert all(said["step"] in ("lock", "checkpoint") for said in refusals[:1])


def test_virtual_memory_that_stays_mapped_is_saved_with_the_process(used: Any) -> None:
    with scenario("kept") as child:
        child.until("awake")
        child.go_on()
        child.until("asleep")
        assert used(child.pid) <= SLACK
        child.go_on()
        child.ends_well()


@pytest.mark.parametrize("mode", ["checkpoint", "cumem+checkpoint"])
def test_a_process_that_ends_asleep_ends_well(mode: str) -> None:
    with scenario("exits_asleep", mode) as child:
        child.until("done")
        started = time.monotonic()
        assert child.process.wait(60) == 0
        assert time.monotonic() - started < 30


def test_too_little_memory_is_seen_before_the_restore() -> None:
    with scenario("held", "3") as child:
        child.until("asleep")
        with neighbour(leave_bytes=2 * GIB) as other:
            child.go_on()
            found = child.until("no_room")
            assert found["needed"] > 3 * GIB
            assert found["available"] < found["needed"]
            let_go(other)
        before = free_device_bytes()
        child.go_on()
        child.ends_well()
        assert before > 3 * GIB


@pytest.mark.parametrize("mode", ["destroy", "suspend"])
def test_two_ranks_are_suspended_together(mode: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    nccl: Any = torch.cuda.nccl
    if mode == "suspend" and nccl.version() < (2, 29, 7):
        pytest.skip(f"NCCL {nccl.version()} has no ncclCommSuspend")
    env = {"NCCL_NVLS_ENABLE": "0"}
    with (
        scenario("nccl", mode, "0", str(tmp_path), **env) as first,
        scenario("nccl", mode, "1", str(tmp_path), **env) as second,
    ):
        ready = [child.until("ready") for child in (first, second)]
        assert [found["sum"] for found in ready] == [3, 3]
        (tmp_path / "pid").write_text(str(second.pid))
        for child in (first, second):
            child.go_on()
        for _ in range(2):
            for child in (first, second):
                assert child.until("torn_down")["mode"] == mode
            first.go_on()
            first.until("asleep")
            first.go_on()
            first.until("awake")
            second.go_on()
            for child in (first, second):
                after = child.until("after")
                assert after["sum"] == 3
                assert after["intact"]
        assert any(said["event"] == "refused" for said in first.said), "live communicators"
        for child in (first, second):
            child.ends_well()
