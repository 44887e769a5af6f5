"""The helper process: its protocol, its socket, and who may ask it for what."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sleepbackends.checkpoint import client, listener
from sleepbackends.checkpoint.client import HelperClient, deadline_s
from sleepbackends.checkpoint.messages import LINE_BYTES, Process, Reply, Request
from sleepbackends.checkpoint.runtime import RuntimeDirectory
from sleepbackends.checkpoint.states import ProcessState
from sleepbackends.checkpoint.targets import Target
from sleepbackends.checkpoint.waking import wake
from sleepbackends.cli import app
from sleepbackends.errors import (
    BackendUnavailableError,
    CheckpointRefusedError,
    DeviceMemoryError,
    HelperError,
    ProcessLostError,
)
from tests.checkpoint.conftest import SIZE, Sleepers
from tests.simulators.cuda import Mishap, SharedDevices

GPU = "GPU-73696d75-6c61-7465-642d-6770752d0000"


class Helped:
    """A helper, two processes, and short ways to ask."""

    def __init__(self, targets: list[Target], runtime: Path, on_exit: str = "keep") -> None:
        self.targets = targets
        self.runtime = RuntimeDirectory(runtime)
        self.client = HelperClient(Target.of(os.getpid()), runtime, on_exit)
        self.number = 0

    def request(self, op: str, **more: Any) -> Request:
        self.number += 1
        processes = [Process(pid=t.pid, started=t.started) for t in self.targets]
        found = {"id": self.number, "op": op, "targets": processes, "devices": [GPU], **more}
        return Request.model_validate(found)

    def call(self, op: str, **more: Any) -> Reply:
        return self.client.call(self.request(op, **more), 10.0)

    def socket(self) -> socket.socket:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(str(self.runtime.socket_of(os.getpid())))
        connected.settimeout(10)
        return connected


@pytest.fixture
def helped(sleepers: Sleepers, runtime: Path) -> Iterator[Helped]:
    helped = Helped(sleepers(2), runtime)
    yield helped
    helped.client.kill()


def said(connected: socket.socket) -> Reply:
    received = b""
    while not received.endswith(b"\n"):
        part = connected.recv(LINE_BYTES)
        assert part, "the connection was closed"
        received += part
    return Reply.model_validate_json(received)


def test_a_cycle_by_its_protocol(helped: Helped, devices: SharedDevices) -> None:
    assert helped.call("ping").ok
    assert helped.call("measure").used_bytes == 2 * SIZE
    down = helped.call("suspend")
    assert down.ok
    assert set(down.states.values()) == {ProcessState.CHECKPOINTED}
    entry = helped.runtime.find(helped.targets[1].pid)
    assert entry is not None
    assert entry.operation == "asleep"
    assert entry.device_bytes == {GPU: 2 * SIZE}
    assert helped.call("resume").ok
    assert helped.runtime.find(helped.targets[1].pid) is None


def test_refusals_are_replies(helped: Helped, devices: SharedDevices) -> None:
    os.kill(helped.targets[0].pid, signal.SIGSTOP)
    time.sleep(0.05)
    refused = helped.call("suspend")
    assert (refused.ok, refused.kind) == (False, "refused")
    assert "stopped" in refused.error
    os.kill(helped.targets[0].pid, signal.SIGCONT)
    devices.forget(helped.targets[1].pid)
    without = helped.call("suspend")
    assert without.states[helped.targets[1].pid] is ProcessState.WITHOUT_CUDA
    with helped.runtime.devices_held([GPU], 0):
        busy = helped.call("suspend", wait_s=0.05)
    assert busy.kind == "busy"
    assert busy.holders == (f"process {os.getpid()}",)


def test_the_socket_is_for_its_user_alone(helped: Helped) -> None:
    helped.call("ping")
    path = helped.runtime.socket_of(os.getpid())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with helped.socket() as mine:
        assert listener.peer_user(mine) == os.getuid()
        mine.sendall(helped.request("ping").model_dump_json().encode() + b"\n")
        assert said(mine).ok


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be somebody else")
def test_another_user_is_not_answered(helped: Helped) -> None:
    """Even one who got hold of the file."""
    helped.call("ping")
    path = helped.runtime.socket_of(os.getpid())
    code = f"""if True:
        import os, socket
        connected = socket.socket(socket.AF_UNIX)
        os.chdir({str(path.parent)!r})
        os.setuid(65534)
        try:
            connected.connect({path.name!r})
            connected.sendall(b'{{"id": 1, "op": "ping"}}\\n')
            print(connected.recv(100))
        except OSError as error:
            print(error)
    """
    for folder in [path.parent, *path.parent.parents[:3]]:
        folder.chmod(0o755)
    path.chmod(0o666)
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert "ping" not in done.stdout
    assert done.stdout.startswith(("b''", "[Errno 32]", "[Errno 104]")), done.stdout


GARBAGE = [
    b"\n",
    b"not JSON\n",
    b"{}\n",
    b'{"id": 1, "op": "destroy"}\n',
    b'{"id": 1, "op": "ping", "more": 1}\n',
    b'{"id": 1, "op": "resume", "targets": [{"pid": -1, "started": 1}]}\n',
    b"\xff\xfe\x00\n",
    b"[" * 50000 + b"\n",
    b"x" * (LINE_BYTES + 10),
]


@pytest.mark.parametrize("message", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_gets_a_reply_and_nothing_else(helped: Helped, message: bytes) -> None:
    helped.call("ping")
    with helped.socket() as connected:
        connected.sendall(message)
        reply = said(connected)
        assert (reply.ok, reply.kind) == (False, "garbage")
        with suppress(ConnectionResetError):  # it has not read all of it
            assert connected.recv(1) == b"", "and the connection ends"
    assert helped.call("ping").ok


def test_others_may_only_wake_and_look(helped: Helped, devices: SharedDevices) -> None:
    helped.call("ping")
    with helped.socket() as connected:
        connected.sendall(helped.request("suspend").model_dump_json().encode() + b"\n")
        assert said(connected).kind == "refused"
        connected.sendall(helped.request("state").model_dump_json().encode() + b"\n")
        assert said(connected).ok
    assert devices.steps(helped.targets[0].pid)["lock"] == 0


def test_connections_that_say_nothing_are_in_nobodys_way(helped: Helped) -> None:
    helped.call("ping")
    silent = [helped.socket() for _ in range(5)]
    silent[0].sendall(b'{"id"')
    assert helped.call("ping").ok
    for connected in silent:
        connected.close()
    assert helped.call("ping").ok


# Waking from outside


def test_the_helper_is_asked_to_wake(helped: Helped, devices: SharedDevices) -> None:
    helped.call("suspend")
    woken = wake(helped.targets[0].pid, helped.runtime.path)
    assert woken.changed
    assert woken.by == "its helper"
    assert set(woken.states.values()) == {ProcessState.RUNNING}
    again = wake(helped.targets[0].pid, helped.runtime.path)
    assert not again.changed


def test_somebody_wakes_in_place_of_a_helper_that_was_killed(
    helped: Helped, devices: SharedDevices
) -> None:
    helped.call("suspend")
    helped.client.kill()
    woken = run_command("--pid", str(helped.targets[1].pid), "--directory", helped.runtime.path)
    assert woken["changed"]
    assert woken["by"] == "this process"
    assert set(woken["states"].values()) == {"running"}
    assert helped.runtime.find(helped.targets[0].pid) is None


@pytest.mark.parametrize("step", ["restore", "unlock"])
def test_a_helper_that_dies_over_it_is_stood_in_for(
    helped: Helped, devices: SharedDevices, step: str
) -> None:
    helped.call("suspend")
    devices.let_fail(helped.targets[0].pid, step, Mishap.CALLER_DIES_AFTER)
    woken = run_command("--pid", str(helped.targets[1].pid), "--directory", helped.runtime.path)
    assert woken["by"] == "this process"
    assert set(woken["states"].values()) == {"running"}


def run_command(*arguments: object, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["resume", "--json", *map(str, arguments)])
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_waking_is_refused_without_room(helped: Helped, devices: SharedDevices) -> None:
    helped.call("suspend")
    devices.set_budget_bytes(2 * SIZE - 1)
    for _ in range(2):
        with pytest.raises(DeviceMemoryError):
            wake(helped.targets[0].pid, helped.runtime.path)
        helped.client.kill()
    assert devices.steps(helped.targets[0].pid)["restore"] == 0
    devices.set_budget_bytes(None)
    assert wake(helped.targets[0].pid, helped.runtime.path).changed


def test_waking_without_a_journal_has_to_be_forced(helped: Helped, devices: SharedDevices) -> None:
    (target, _) = helped.targets
    devices.put_state(target.pid, 2)
    found = run_command("--pid", target.pid, "--directory", helped.runtime.path, code=2)
    assert found["error"]["type"] == "CheckpointRefusedError"
    found = run_command("--pid", target.pid, "--directory", helped.runtime.path, "--force")
    assert found["states"] == {str(target.pid): "running"}


def test_the_rest_of_a_group_is_woken_by_force(helped: Helped, devices: SharedDevices) -> None:
    helped.call("suspend")
    lost, kept = helped.targets
    os.kill(lost.pid, signal.SIGKILL)
    while lost.is_alive():
        time.sleep(0.001)
    with pytest.raises(ProcessLostError):
        wake(kept.pid, helped.runtime.path)
    assert wake(kept.pid, helped.runtime.path, force=True).states[kept.pid] is ProcessState.RUNNING


def test_a_process_that_is_none(runtime: Path) -> None:
    with pytest.raises(CheckpointRefusedError, match="no such process"):
        wake(1 << 30, runtime)


def test_a_lock_interrupted_half_way_tells_what_is_needed(
    helped: Helped, devices: SharedDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper died after the checkpoint, before it could write down what was freed."""
    devices.let_fail(helped.targets[0].pid, "checkpoint", Mishap.CALLER_DIES_AFTER)
    with pytest.raises(HelperError):
        helped.call("suspend")
    entry = helped.runtime.find(helped.targets[0].pid)
    assert entry is not None
    assert entry.operation == "suspend"
    devices.set_budget_bytes(SIZE - 1)
    with pytest.raises(DeviceMemoryError):
        wake(helped.targets[0].pid, helped.runtime.path)
    devices.set_budget_bytes(None)
    assert wake(helped.targets[0].pid, helped.runtime.path).changed


# How it ends, and how it fails


@pytest.mark.parametrize("on_exit", ["keep", "resume"])
def test_what_happens_when_the_owner_dies(
    sleepers: Sleepers, runtime: Path, devices: SharedDevices, on_exit: str
) -> None:
    (target,) = sleepers(1)
    code = f"""if True:
        import sys, os
        sys.path[:] = {sys.path!r}
        from pathlib import Path
        from tests.checkpoint.test_helper import Helped
        from sleepbackends.checkpoint.targets import Target
        helped = Helped([Target.of({target.pid})], Path({str(runtime)!r}), {on_exit!r})
        assert helped.call("suspend").ok
        print(helped.client.pid, flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as owner:
        assert owner.stdout is not None
        helper = Target.of(int(owner.stdout.readline()))
        owner.kill()
    give_up = time.monotonic() + 10
    while helper.is_alive() and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not helper.is_alive(), "it ends with its owner"
    assert devices.checkpoint_state(target.pid) == (2 if on_exit == "keep" else 0)
    wake(target.pid, runtime)
    assert devices.checkpoint_state(target.pid) == 0
    assert not list(runtime.glob("*.sock"))


def test_a_helper_that_cannot_work_says_why(
    helped: Helped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMULATED_CUDA_DEVICES", "0")
    with pytest.raises(BackendUnavailableError, match="NO_DEVICE"):
        helped.call("ping")


def test_one_that_dies_at_its_start(helped: Helped, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.stderr.write('out of luck\\n'); sys.exit(3)"
    monkeypatch.setattr(client, "python_command", lambda *_: [sys.executable, "-S", "-c", code])
    with pytest.raises(HelperError, match=r"died \(starting, exit code 3\): out of luck"):
        helped.call("ping")


@pytest.mark.parametrize("line", ["garbage", '{"id": 99, "ok": true}'])
def test_one_that_answers_with_garbage(
    helped: Helped, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    code = f"print('{{\"helper\": 1}}', flush=True); input(); print({line!r}, flush=True); input()"
    monkeypatch.setattr(client, "python_command", lambda *_: [sys.executable, "-S", "-c", code])
    with pytest.raises(HelperError, match="answered"):
        helped.call("ping")
    assert helped.client.pid is None


def test_deadlines_are_generous_and_finite(helped: Helped) -> None:
    asking = deadline_s(helped.request("state"), 0)
    down = deadline_s(helped.request("suspend", lock_timeout_s=10), 32 << 30)
    up = deadline_s(helped.request("resume"), 32 << 30)
    # Measured: 16 s down and 7 s up.
    assert asking < 60 < up < down < 600
