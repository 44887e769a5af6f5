"""Every row of the table of what is undone, and random sequences, over the simulated driver."""

from __future__ import annotations

import os
import signal
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sleepbackends.checkpoint.driver import CheckpointDriver
from sleepbackends.checkpoint.group import Group, Outcome
from sleepbackends.checkpoint.states import ProcessState
from sleepbackends.checkpoint.targets import Target
from tests.checkpoint.conftest import SIZE, Sleepers
from tests.simulators.cuda import Mishap, SharedDevices, Simulator

S = ProcessState
OUT_OF_MEMORY, OPERATING_SYSTEM, NOT_SUPPORTED, FAILS_FOR_GOOD = 2, 304, 801, 999
LOCK_TIMEOUT_S = 0.02


@pytest.fixture
def driver(simulator: Simulator) -> CheckpointDriver:
    driver = CheckpointDriver()
    assert driver.initialise() == ""
    return driver


@pytest.fixture
def three(sleepers: Sleepers) -> list[Target]:
    return sleepers(3)


@pytest.fixture
def group(driver: CheckpointDriver, three: list[Target]) -> Group:
    return Group(driver, three)


def states(outcome: Outcome) -> list[ProcessState]:
    return list(outcome.states.values())


def used(devices: SharedDevices) -> list[int]:
    return [size for size in devices.used_bytes().values() if size]


def test_a_cycle(group: Group, devices: SharedDevices) -> None:
    for _ in range(2):
        down = group.suspend(LOCK_TIMEOUT_S)
        assert down.ok
        assert states(down) == [S.CHECKPOINTED] * 3
        assert used(devices) == []
        up = group.resume()
        assert up.ok
        assert states(up) == [S.RUNNING] * 3
        assert used(devices) == [SIZE] * 3


def test_what_is_so_already_is_left_alone(
    group: Group, three: list[Target], devices: SharedDevices
) -> None:
    again = group.resume()
    assert again.ok
    assert not again.changed
    assert group.suspend(LOCK_TIMEOUT_S).ok
    second = group.suspend(LOCK_TIMEOUT_S)
    assert not second.ok
    assert not second.changed
    assert states(second) == [S.CHECKPOINTED] * 3
    assert devices.steps(three[0].pid)["lock"] == 1


# The rows of the table


@pytest.mark.parametrize("rank", range(3))
def test_a_lock_that_times_out_leaves_all_running(
    group: Group, three: list[Target], devices: SharedDevices, rank: int
) -> None:
    devices.set_busy(three[rank].pid, True)
    started = time.monotonic()
    outcome = group.suspend(LOCK_TIMEOUT_S)
    assert time.monotonic() - started < 5
    assert not outcome.ok
    assert outcome.step == "lock"
    assert outcome.answers == {three[rank].pid: "NOT_READY"}
    assert states(outcome) == [S.RUNNING] * 3
    devices.set_busy(three[rank].pid, False)
    assert group.suspend(LOCK_TIMEOUT_S).ok


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("code", [OUT_OF_MEMORY, NOT_SUPPORTED])
def test_a_checkpoint_that_fails_is_undone_on_all(
    group: Group, three: list[Target], devices: SharedDevices, rank: int, code: int
) -> None:
    devices.let_fail(three[rank].pid, "checkpoint", code)
    outcome = group.suspend(LOCK_TIMEOUT_S)
    assert outcome.step == "checkpoint"
    assert list(outcome.answers) == [three[rank].pid]
    assert states(outcome) == [S.RUNNING] * 3
    assert used(devices) == [SIZE] * 3
    assert group.suspend(LOCK_TIMEOUT_S).ok


def test_peers_of_a_failed_process_are_not_let_loose(
    group: Group, three: list[Target], devices: SharedDevices
) -> None:
    devices.let_fail(three[1].pid, "checkpoint", FAILS_FOR_GOOD)
    outcome = group.suspend(LOCK_TIMEOUT_S)
    assert states(outcome) == [S.CHECKPOINTED, S.FAILED, S.CHECKPOINTED]
    assert not group.resume().ok
    assert devices.steps(three[0].pid)["restore"] == 0
    rest = group.resume(without_lost=True)
    assert rest.ok
    assert states(rest) == [S.RUNNING, S.FAILED, S.RUNNING]


def test_a_restore_without_memory_is_tried_once(
    group: Group, three: list[Target], devices: SharedDevices
) -> None:
    assert group.suspend(LOCK_TIMEOUT_S).ok
    devices.set_budget_bytes(2 * SIZE)
    outcome = group.resume()
    assert outcome.step == "restore"
    (lost,) = outcome.answers
    assert outcome.answers[lost] == "OUT_OF_MEMORY"
    assert devices.steps(lost)["restore"] == 1
    assert sorted(states(outcome)) == sorted([S.CHECKPOINTED, S.LOCKED, S.LOCKED])
    devices.set_budget_bytes(None)
    again = group.resume()
    assert again.answers == {lost: "OPERATING_SYSTEM"}, "wedged for good"
    assert sorted(states(again)) == sorted([S.CHECKPOINTED, S.LOCKED, S.LOCKED])


def test_a_map_that_does_not_fit_is_left_out(
    group: Group, three: list[Target], devices: SharedDevices
) -> None:
    assert group.suspend(LOCK_TIMEOUT_S).ok
    device = "GPU-73696d75-6c61-7465-642d-6770752d0000"
    assert group.resume([(device, device)]).ok, "two devices, one of them named"
    assert devices.migrations(three[0].pid) == 0
    assert devices.steps(three[0].pid)["restore"] == 2
    assert group.suspend(LOCK_TIMEOUT_S).ok
    both = [(device, device), (device[:-1] + "1", device[:-1] + "1")]
    assert group.resume(both).ok
    assert devices.migrations(three[0].pid) == 2


def test_an_unlock_that_fails_can_be_repeated(
    group: Group, three: list[Target], devices: SharedDevices
) -> None:
    assert group.suspend(LOCK_TIMEOUT_S).ok
    devices.let_fail(three[2].pid, "unlock", NOT_SUPPORTED)
    outcome = group.resume()
    assert outcome.step == "unlock"
    assert states(outcome) == [S.RUNNING, S.RUNNING, S.LOCKED]
    assert group.resume().ok


def test_the_state_cannot_be_told(
    group: Group, three: list[Target], devices: SharedDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.let_fail(three[1].pid, "state", OPERATING_SYSTEM)
    outcome = group.suspend(LOCK_TIMEOUT_S)
    assert states(outcome) == [S.RUNNING, S.SILENT, S.RUNNING]
    assert devices.steps(three[0].pid)["lock"] == 0
    monkeypatch.setattr("sleepbackends.checkpoint.group.STATE_TIMEOUT_S", 0.1)
    devices.let_fail(three[2].pid, "state", Mishap.HANGS)
    assert group.states()[three[2].pid] is S.SILENT


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
def test_a_process_that_dies_in_a_suspend(
    group: Group, three: list[Target], devices: SharedDevices, step: str
) -> None:
    """Its call never returns; the others are not let loose, but can be."""
    devices.let_fail(three[1].pid, step, Mishap.TARGET_DIES)
    outcome = group.suspend(LOCK_TIMEOUT_S)
    assert outcome.answers == {three[1].pid: "the process has ended"}
    assert outcome.states[three[1].pid] is S.GONE
    rest = group.resume(without_lost=True)
    assert rest.ok
    assert states(rest) == [S.RUNNING, S.GONE, S.RUNNING]


def test_a_process_that_dies_in_a_resume(
    group: Group, three: list[Target], devices: SharedDevices
) -> None:
    assert group.suspend(LOCK_TIMEOUT_S).ok
    devices.let_fail(three[0].pid, "restore", Mishap.TARGET_DIES)
    outcome = group.resume()
    assert outcome.step == "restore"
    assert states(outcome) == [S.GONE, S.LOCKED, S.LOCKED]
    assert states(group.resume(without_lost=True)) == [S.GONE, S.RUNNING, S.RUNNING]


def test_a_process_that_dies_asleep(group: Group, three: list[Target]) -> None:
    assert group.suspend(LOCK_TIMEOUT_S).ok
    os.kill(three[2].pid, signal.SIGKILL)
    while three[2].is_alive():
        time.sleep(0.001)
    outcome = group.resume()
    assert not outcome.ok
    assert states(outcome) == [S.CHECKPOINTED, S.CHECKPOINTED, S.GONE]
    assert states(group.resume(without_lost=True)) == [S.RUNNING, S.RUNNING, S.GONE]


# Random sequences

STEPS = st.sampled_from(["lock", "checkpoint", "restore", "unlock", "state"])
CODES = st.sampled_from([OUT_OF_MEMORY, OPERATING_SYSTEM, NOT_SUPPORTED, FAILS_FOR_GOOD])
ACTIONS = st.one_of(
    st.tuples(st.just("suspend")),
    st.tuples(st.just("resume")),
    st.tuples(st.just("fault"), st.integers(0, 1), STEPS, CODES),
    st.tuples(st.just("busy"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("budget"), st.sampled_from([None, SIZE])),
)


class Checked:
    """Two processes, and what has to hold of them after each call."""

    def __init__(self, group: Group, pids: list[int], devices: SharedDevices) -> None:
        self.group = group
        self.pids = pids
        self.devices = devices
        self.reset()

    def reset(self) -> None:
        self.devices.set_budget_bytes(None)
        for pid in self.pids:
            self.devices.put_state(pid, 0)

    def actual(self) -> list[ProcessState]:
        names = [S.RUNNING, S.LOCKED, S.CHECKPOINTED, S.FAILED]
        return [names[self.devices.checkpoint_state(pid)] for pid in self.pids]

    def do(self, action: tuple[object, ...]) -> None:
        kind, *rest = action
        if kind == "fault":
            rank, step, code = rest
            assert isinstance(rank, int)
            assert isinstance(code, int)
            self.devices.let_fail(self.pids[rank], str(step), code)
        elif kind == "busy":
            assert isinstance(rest[0], int)
            self.devices.set_busy(self.pids[rest[0]], bool(rest[1]))
        elif kind == "budget":
            assert rest[0] is None or isinstance(rest[0], int)
            self.devices.set_budget_bytes(rest[0])
        else:
            self.call(str(kind))

    def call(self, kind: str) -> None:
        before = self.actual()
        outcome = self.group.suspend(0.002) if kind == "suspend" else self.group.resume()
        after = self.actual()
        told = list(outcome.states.values())
        assert all(said in (is_so, S.SILENT) for said, is_so in zip(told, after, strict=True))
        if outcome.ok:
            wanted = S.CHECKPOINTED if kind == "suspend" else S.RUNNING
            assert after == [wanted] * 2
        if not outcome.changed:
            assert after == before
        if S.RUNNING in after and outcome.step in ("lock", "checkpoint"):
            lost = not all(state.can_be_woken for state in told)
            assert after == [S.RUNNING] * 2 or lost or outcome.undo
        # All were restored where only the last step fails.
        woke = S.RUNNING in after and S.RUNNING not in before and outcome.step != "unlock"
        assert not (woke and {S.CHECKPOINTED, S.FAILED} & set(after)), "one runs on without another"

    def can_be_mended(self) -> bool:
        return S.FAILED not in self.actual() and not any(map(self.devices.is_wedged, self.pids))


def test_a_thousand_random_sequences(
    driver: CheckpointDriver, sleepers: Sleepers, devices: SharedDevices
) -> None:
    targets = sleepers(2)
    checked = Checked(Group(driver, targets), [target.pid for target in targets], devices)

    @settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(ACTIONS, min_size=1, max_size=6))
    def run(actions: list[tuple[object, ...]]) -> None:
        checked.reset()
        for action in actions:
            checked.do(action)
        if checked.can_be_mended():
            # Whatever happened: without faults, the way back to running is one call.
            devices.set_budget_bytes(None)
            for pid in checked.pids:
                devices.set_busy(pid, False)
                for step in ("lock", "checkpoint", "restore", "unlock", "state"):
                    devices.let_fail(pid, step, 0)
            assert checked.group.resume().ok
            assert checked.actual() == [S.RUNNING] * 2

    run()
