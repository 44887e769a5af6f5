"""The script for people with a card, on the simulated driver."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from sleepbackends.availability import Availability
from sleepbackends.registry import Registry
from sleepbackends.testing import selfcheck
from sleepbackends.xpu.backend import XpuBackend
from sleepbackends.xpu.driver import XpuDriver
from tests.simulators.level_zero import Simulator, environment


def run(devices: int) -> subprocess.CompletedProcess[str]:
    command = ["-m", "sleepbackends.xpu.selfcheck", "--size-mib", "3", "--sequences", "3"]
    return subprocess.run(
        [sys.executable, *command],
        env=environment(devices),
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_prints_one_block_to_paste() -> None:
    done = run(1)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-2:]) == ("```text", ["everything is well", "```"])
    assert "1 Intel GPU(s)" in done.stdout
    assert "0 failures, 0 errors" in done.stdout
    assert done.stdout.count("suspend ") == done.stdout.count("resume ") == selfcheck.ROUNDS


def test_without_a_device_it_says_why() -> None:
    done = run(0)
    assert done.returncode == 1
    assert "xpu: not usable: Level Zero " in done.stdout
    assert "nothing was checked" in done.stdout
    assert "Traceback" not in done.stderr


def nothing(*_: object) -> Iterator[str]:
    yield from ()


@pytest.fixture
def cycle(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a probe that says yes, and only the cycle checked."""
    monkeypatch.setattr(selfcheck, "_contract", nothing)
    monkeypatch.setattr(selfcheck, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(XpuBackend, "probe", lambda: Availability(True, "yes"))


@pytest.mark.usefixtures("cycle")
def test_bytes_that_are_lost_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = XpuDriver.read

    def other(driver: XpuDriver, address: int, size_bytes: int, device: int) -> bytes:
        return real(driver, address, size_bytes, device)[:-1] + b"?"

    monkeypatch.setattr(XpuDriver, "read", other)
    assert selfcheck.main(["xpu", "--size-mib", "2"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: RuntimeError: 2 of 2 pieces hold other bytes: [0, 1]" in printed
    assert "please report this block" in printed


@pytest.mark.usefixtures("cycle")
def test_memory_that_is_not_given_back_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(XpuDriver, "free_bytes", lambda *_: 1)
    assert selfcheck.main(["xpu", "--size-mib", "2"]) == 1
    assert "only 0 of 2097152 bytes were given back" in capsys.readouterr().out


def test_a_contract_that_is_not_kept_is_reported(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process that runs the suite has no device here, so that nothing of it passes."""
    monkeypatch.setattr(selfcheck, "_cycle", nothing)
    monkeypatch.setattr(Registry, "probe", lambda *_: Availability(True, "yes"))
    assert selfcheck.main(["xpu", "--sequences", "1"]) == 1
    printed = capsys.readouterr().out
    assert " failures, " in printed
    assert "FAILED: RuntimeError: " in printed
    assert "Level Zero cannot be initialised" in printed
