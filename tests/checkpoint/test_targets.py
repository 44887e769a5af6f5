"""Processes that must be left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sleepbackends.checkpoint import targets
from sleepbackends.checkpoint.targets import Target, check
from sleepbackends.errors import CheckpointRefusedError, RequestError


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_this_process() -> None:
    target = Target.of(os.getpid())
    assert target.is_alive()
    check(target)
    assert issubclass(CheckpointRefusedError, RequestError)


def test_a_thread() -> None:
    found: list[int] = []
    done = threading.Event()

    def work() -> None:
        found.append(threading.get_native_id())
        done.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    while not found:
        time.sleep(0.001)
    with pytest.raises(CheckpointRefusedError, match="is a thread of process") as caught:
        Target.of(found[0])
    assert str(os.getpid()) in caught.value.hint
    done.set()
    thread.join()


def test_nobody_and_one_that_ended() -> None:
    with running("sleep", "60") as process:
        target = Target.of(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        while target.is_alive():
            time.sleep(0.001)
        with pytest.raises(CheckpointRefusedError, match="has ended"):
            check(target)
    with pytest.raises(CheckpointRefusedError, match="no such process"):
        Target.of(process.pid)
    assert not Target(os.getpid(), 1).is_alive(), "a later process of the same number"


def test_one_that_is_stopped() -> None:
    with running("sleep", "60") as process:
        target = Target.of(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        while "State:\tT" not in Path(f"/proc/{process.pid}/status").read_text():
            time.sleep(0.001)
        with pytest.raises(CheckpointRefusedError, match="stopped") as caught:
            check(target)
        assert "SIGCONT" in caught.value.hint
        os.kill(process.pid, signal.SIGCONT)
        check(target)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be somebody else")
def test_one_of_another_user() -> None:
    """Asked by a user who may not look into it."""
    code = f"""if True:
        import os, sys
        sys.path[:] = {sys.path!r}
        from sleepbackends.checkpoint.targets import Target, check
        os.setuid(65534)
        try:
            check(Target.of(int(sys.argv[1])))
        except Exception as error:
            print(type(error).__name__, error)
    """
    with running("sleep", "60") as process:
        done = subprocess.run(
            [sys.executable, "-c", code, str(process.pid)],
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.startswith("CheckpointRefusedError"), done.stderr
    assert "belongs to user 0" in done.stdout


FORKED = """
import os, sys
held = open(sys.argv[1])
child = os.fork()
if child == 0:
    if sys.argv[2] == "exec":
        os.set_inheritable(held.fileno(), True)
        os.execvp("sleep", ["sleep", "60"])
    sys.stdin.read()
print(child, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_children_that_share_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    device = tmp_path / "nvidia0"
    device.touch()
    monkeypatch.setattr(targets, "DEVICES", str(tmp_path / "nvidia"))
    command = (sys.executable, "-S", "-c", FORKED, str(device), how)
    with running(*command) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        target = Target.of(process.pid)
        if how == "exec":
            while Path(f"/proc/{child}/comm").read_text() != "sleep\n":
                time.sleep(0.001)
            check(target)
        else:
            with pytest.raises(CheckpointRefusedError, match=f"child {child} was forked"):
                check(target)
            monkeypatch.setattr(targets, "DEVICES", "/dev/nvidia")
            check(target)
        os.kill(child, signal.SIGKILL)


def test_one_in_a_frozen_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.of(os.getpid())
    group = Path(f"/proc/{os.getpid()}/cgroup").read_text().splitlines()[-1].rpartition(":")[2]
    folder = tmp_path / group.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    monkeypatch.setattr(targets, "GROUPS", tmp_path)
    check(target)
    (folder / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    with pytest.raises(CheckpointRefusedError, match="frozen"):
        check(target)
