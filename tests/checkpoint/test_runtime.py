"""The journal, the locks of devices, and the directory they are in."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from sleepbackends.checkpoint.runtime import Entry, RuntimeDirectory
from sleepbackends.checkpoint.targets import Target
from sleepbackends.errors import BusyError, StorageError

GPU = "GPU-1"


@pytest.fixture
def directory(tmp_path: Path) -> RuntimeDirectory:
    return RuntimeDirectory(tmp_path / "runtime")


@pytest.fixture
def entry() -> Entry:
    me = Target.of(os.getpid())
    return Entry("asleep", (me,), {GPU: 5}, me, {GPU: 7})


def test_what_was_written_is_found(directory: RuntimeDirectory, entry: Entry) -> None:
    me = os.getpid()
    assert directory.entry_of(me) is None
    directory.write(entry)
    assert directory.entry_of(me) == directory.find(me) == entry
    assert directory.find(1) is None
    directory.erase(me)
    directory.erase(me)
    assert directory.find(me) is None


def test_entries_of_another_time_are_forgotten(directory: RuntimeDirectory, entry: Entry) -> None:
    me = os.getpid()
    for stale in (replace(entry, boot="another"), replace(entry, targets=(Target(me, 1),))):
        directory.write(stale)
        assert directory.entry_of(me) is None
        assert directory.find(me) is None
        assert not list(directory.path.glob("*.json"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"targets": 1}', "\0", '{"targets": [{}]}'])
def test_garbage_is_no_entry(directory: RuntimeDirectory, text: str) -> None:
    (directory.path / f"{os.getpid()}.json").write_text(text)
    assert directory.entry_of(os.getpid()) is None
    assert directory.find(os.getpid()) is None


def test_a_journal_that_cannot_be_written(
    directory: RuntimeDirectory, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StorageError, match="No space left"):
        directory.write(entry)


def test_the_directory_is_its_users_alone(tmp_path: Path) -> None:
    made = RuntimeDirectory(tmp_path / "a" / "b")
    assert made.path.stat().st_mode & 0o777 == 0o700
    made.path.chmod(0o777)
    with pytest.raises(StorageError, match="open to other users"):
        RuntimeDirectory(made.path)
    with pytest.raises(StorageError, match="too long"):
        RuntimeDirectory(tmp_path / ("long" * 20))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        RuntimeDirectory(tmp_path / "file" / "below")


def test_one_at_a_time_on_a_device(directory: RuntimeDirectory) -> None:
    with directory.devices_held([GPU], 0.0):
        with directory.devices_held(["GPU-2"], 0.0):
            pass
        with (
            pytest.raises(BusyError, match=GPU) as caught,
            directory.devices_held(["GPU-2", GPU], 0.05),
        ):
            pass
        assert caught.value.holders == (f"process {os.getpid()}",)
    with directory.devices_held([GPU, "GPU-2"], 0.0):
        pass


def test_one_that_waits_gets_its_turn(directory: RuntimeDirectory) -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with directory.devices_held([GPU], 1.0):
            held.set()
            release.wait(5)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(5)
    threading.Timer(0.05, release.set).start()
    with directory.devices_held([GPU], 5.0):
        assert release.is_set()
    thread.join()


def test_a_holder_that_dies_lets_go(directory: RuntimeDirectory) -> None:
    code = f"""if True:
        import sys
        sys.path[:] = {sys.path!r}
        from pathlib import Path
        from sleepbackends.checkpoint.runtime import RuntimeDirectory
        with RuntimeDirectory(Path({str(directory.path)!r})).devices_held([{GPU!r}], 1):
            print("held", flush=True)
            sys.stdin.read()
    """
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BusyError), directory.devices_held([GPU], 0.0):
            pass
        other.kill()
        with directory.devices_held([GPU], 5.0):
            pass
