"""A process is saved to a directory, killed, restored and goes on; without CUDA."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sleepbackends.availability import Availability
from sleepbackends.checkpoint import durable
from sleepbackends.checkpoint.targets import Target
from sleepbackends.cli import app
from sleepbackends.errors import PolicyConflictError, StorageError, UnsupportedOperationError

AVAILABLE = durable.probe()

# Counts in memory, is saved in the middle, and says what it counts before and after.
COUNTER = """
import hashlib, json, os, sys, time
sys.path[:] = json.loads(sys.argv[2])
from pathlib import Path
from sleepbackends.checkpoint import durable
directory = Path(sys.argv[1])
memory = bytearray(os.urandom(64 << 20))
digest = hashlib.sha256(memory).hexdigest()
count = 41
(directory / "started").write_text(digest)
while not (directory / "go").exists():
    time.sleep(0.01)
saved = durable.save_process(os.getpid(), directory)
count += 1
same = hashlib.sha256(memory).hexdigest() == digest
found = {"pid": os.getpid(), "count": count, "same": same, "restored": saved.restored}
path = directory / ("after" if saved.restored else "before")
path.with_suffix(".new").write_text(json.dumps(found))
path.with_suffix(".new").rename(path)
time.sleep(60)
"""


def wait_for(path: Path) -> str:
    give_up = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < give_up, f"{path} does not come"
        time.sleep(0.01)
    return path.read_text()


@pytest.mark.skipif(not AVAILABLE, reason=AVAILABLE.reason)
def test_a_process_is_saved_killed_and_restored(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COUNTER, str(tmp_path), json.dumps(sys.path)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    with process:
        try:
            wait_for(tmp_path / "started")
            (tmp_path / "go").touch()
            before: dict[str, Any] = json.loads(wait_for(tmp_path / "before"))
            with pytest.raises(StorageError, match="still there"):
                durable.restore(tmp_path)
        finally:
            process.kill()
    assert before == {"pid": process.pid, "count": 42, "same": True, "restored": False}
    done = CliRunner().invoke(app, ["restore", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    pid = json.loads(done.stdout)["pid"]
    try:
        assert pid == process.pid
        after = json.loads(wait_for(tmp_path / "after"))
        assert after == {**before, "restored": True}
    finally:
        os.kill(pid, signal.SIGKILL)
        while Target(pid, 0).is_alive() or Path(f"/proc/{pid}/stat").exists():
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                break


def criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (tmp_path / "criu").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "criu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo Version: 3.17.1", "CRIU 3.17 is too old"),
        ("echo nonsense", "of an unknown version"),
        ('[ "$1" = --version ] && echo Version: 4.1.1 || { echo vdso Error; exit 1; }', "its own"),
    ],
)
def test_without_a_criu_that_works_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    criu(tmp_path, monkeypatch, script)
    answer = durable.probe()
    assert not answer.ok
    assert reason in answer.reason
    assert answer.hint
    with pytest.raises(UnsupportedOperationError, match=reason):
        durable.restore(tmp_path)


def test_with_one_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    criu(tmp_path, monkeypatch, "echo Version: 4.2")
    assert durable.probe().ok


def test_no_criu_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "not installed" in durable.probe().reason


def test_what_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedOperationError, match="because"):
        durable.check_savable(Availability(False, "because"), asleep=True)
    with pytest.raises(PolicyConflictError, match="awake"):
        durable.check_savable(Availability(True), asleep=False)
    durable.check_savable(Availability(True), asleep=True)
    others = [Target(os.getpid(), 1), Target(1, 1)]
    with pytest.raises(UnsupportedOperationError, match="alone"):
        durable.save(tmp_path, others, [])
    (tmp_path / "device").touch()
    monkeypatch.setattr(durable, "DEVICES", str(tmp_path / "dev"))
    with (
        (tmp_path / "device").open(),
        pytest.raises(UnsupportedOperationError, match=r"still has .*device open"),
    ):
        durable.save(tmp_path, others[:1], [])


def test_a_save_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    criu(tmp_path, monkeypatch, "exit 1")
    with pytest.raises(StorageError, match="could not save"):
        durable.save_process(os.getpid(), tmp_path / "image")
    with pytest.raises(StorageError, match="failed"):
        durable.read_meta(tmp_path / "image")
    with pytest.raises(StorageError, match="nothing was saved"):
        durable.read_meta(tmp_path / "elsewhere")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be used"):
        durable.save_process(os.getpid(), tmp_path / "file" / "below")
