from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from pathlib import Path

import pytest

from sleepbackends.errors import StorageError
from sleepbackends.host import directory as directories
from sleepbackends.host.directory import choose_directory, filesystem_of, lock_directory

FALLBACK = Path("/var/tmp")  # noqa: S108
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


def test_a_missing_directory_is_made_private(tmp_path: Path) -> None:
    made = choose_directory(tmp_path / "a" / "b", False)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_what_is_not_a_directory_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match="file"):
            choose_directory(path, False)


def test_one_backend_at_a_time(tmp_path: Path) -> None:
    lock = lock_directory(tmp_path)
    with pytest.raises(StorageError, match="in use by another backend") as caught:
        lock_directory(tmp_path)
    assert str(tmp_path) in caught.value.message
    assert "its own spool_directory" in caught.value.hint
    directories.unlock_directory(lock)
    directories.unlock_directory(lock_directory(tmp_path))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = lock_directory(tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    directories.unlock_directory(lock)
    directories.unlock_directory(lock_directory(tmp_path))
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


def test_the_default_is_the_first_directory_that_is_not_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: dict[Path, str | None] = {tmp_path: "ext4", FALLBACK: "xfs"}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(directories, "filesystem_of", kinds.get)
    assert choose_directory(None, False) == tmp_path
    kinds[tmp_path] = "tmpfs"
    assert choose_directory(None, False) == FALLBACK
    assert choose_directory(None, True) == tmp_path
    kinds[FALLBACK] = "ramfs"
    with pytest.raises(StorageError, match=f"{FALLBACK} is kept in memory") as caught:
        choose_directory(None, False)
    assert "spool_directory" in caught.value.hint


def test_the_file_system_is_read_from_the_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert filesystem_of(Path("/proc")) == "proc"
    monkeypatch.setattr(directories, "_MOUNTS", Path("/nonexistent"))
    assert filesystem_of(Path("/proc")) is None


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK), reason="needs a directory in memory")
def test_a_directory_in_memory_has_to_be_allowed() -> None:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as name:
        with pytest.raises(StorageError, match="tmpfs, which is memory") as caught:
            choose_directory(Path(name), False)
        assert "allow_memory_filesystem" in caught.value.hint
        assert choose_directory(Path(name), True) == Path(name)
