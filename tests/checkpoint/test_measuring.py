"""Devices are measured while this process is asleep, too."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from sleepbackends.checkpoint import measuring
from sleepbackends.checkpoint.device_memory import DeviceMonitor
from sleepbackends.checkpoint.measuring import OutsideMonitor
from sleepbackends.errors import BackendUnavailableError
from tests.checkpoint.conftest import SIZE
from tests.simulators.cuda import SharedDevices, Simulator
from tests.simulators.cuda.driving import Driven

ME = os.getpid()
CHECKPOINTED, RUNNING = 2, 0


@pytest.fixture
def uuid(simulator: Simulator) -> str:
    Driven().call("cuMemAlloc", SIZE)
    return DeviceMonitor().devices[0]


def test_it_finds_what_this_process_finds(uuid: str) -> None:
    found = OutsideMonitor().measure([uuid])
    assert found == DeviceMonitor().measure([uuid])
    assert found[uuid].processes == {ME: SIZE}
    assert OutsideMonitor().measure(["GPU-of-nobody"]) == {}


def test_a_sleeping_process_asks_another_one(uuid: str, devices: SharedDevices) -> None:
    devices.put_state(ME, CHECKPOINTED)
    itself = threading.Thread(target=DeviceMonitor)
    try:
        itself.start()
        assert set(OutsideMonitor().measure([uuid])) == {uuid}
        assert itself.is_alive(), "calls of its own wait"
    finally:
        devices.put_state(ME, RUNNING)
        itself.join(30)
    assert not itself.is_alive()


def test_nothing_is_asked_about_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was"))
    assert OutsideMonitor().measure([]) == {}


def test_a_library_that_is_missing(uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    with pytest.raises(BackendUnavailableError, match="management library"):
        OutsideMonitor().measure([uuid])


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit('no room here')", "no room here"),
        ("print('garbage')", "it said 'garbage'"),
        ("print('{\"devices\": 5}')", "it said"),
        ("import time; time.sleep(600)", "timed out"),
    ],
)
def test_a_process_that_does_not_answer(
    uuid: str, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    def command(*_: Any) -> list[str]:
        return [sys.executable, "-c", code]

    monkeypatch.setattr(measuring, "python_command", command)
    monkeypatch.setattr(measuring, "TIMEOUT_S", 2.0)
    with pytest.raises(BackendUnavailableError, match=why) as caught:
        OutsideMonitor().measure([uuid])
    assert "resume --pid" in str(caught.value.hint)
