from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from sleepbackends.errors import StorageError
from sleepbackends.host.directory import lock_directory, unlock_directory


def test_one_backend_at_a_time(tmp_path: Path) -> None:
    lock = lock_directory(tmp_path)
    with pytest.raises(StorageError, match="in use by another backend") as caught:
        lock_directory(tmp_path)
    assert str(tmp_path) in caught.value.message
    assert "its own spool_directory" in caught.value.hint
    unlock_directory(lock)
    unlock_directory(lock_directory(tmp_path))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = lock_directory(tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    unlock_directory(lock)
    unlock_directory(lock_directory(tmp_path))
    os.close(writing)
    os.close(reading)
    os.waitpid(child, 0)


def test_a_directory_that_cannot_be_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="cannot be locked: No locks"):
        lock_directory(tmp_path)
    with pytest.raises(StorageError, match="cannot be opened"):
        lock_directory(tmp_path / "missing")
