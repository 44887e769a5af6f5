"""Which directory is chosen for saved bytes, and which is refused."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from sleepbackends.errors import StorageError
from sleepbackends.hostmemory import directory as directories
from sleepbackends.hostmemory.directory import choose_directory, filesystem_of

OPTION = "some_directory"
FALLBACK = Path("/var/tmp")  # noqa: S108
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


def test_a_missing_directory_is_made_private(tmp_path: Path) -> None:
    made = choose_directory(tmp_path / "a" / "b", OPTION)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_what_is_not_a_directory_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match="file"):
            choose_directory(path, OPTION)


def test_the_default_is_the_first_directory_that_is_not_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: dict[Path, str | None] = {tmp_path: "ext4", FALLBACK: "xfs"}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(directories, "filesystem_of", kinds.get)
    assert choose_directory(None, OPTION) == tmp_path
    kinds[tmp_path] = "tmpfs"
    assert choose_directory(None, OPTION) == FALLBACK
    assert choose_directory(None, OPTION, allow_memory=True) == tmp_path
    kinds[FALLBACK] = "ramfs"
    with pytest.raises(StorageError, match=f"{FALLBACK} is kept in memory") as caught:
        choose_directory(None, OPTION)
    assert OPTION in caught.value.hint


def test_the_file_system_is_read_from_the_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert filesystem_of(Path("/proc")) == "proc"
    monkeypatch.setattr(directories, "_MOUNTS", Path("/nonexistent"))
    assert filesystem_of(Path("/proc")) is None


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK), reason="needs a directory in memory")
def test_a_directory_in_memory_has_to_be_allowed() -> None:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as name:
        with pytest.raises(StorageError, match="tmpfs, which is memory") as caught:
            choose_directory(Path(name), OPTION, allow_hint=", or say so")
        assert caught.value.hint == "choose a some_directory on a disk, or say so"
        assert choose_directory(Path(name), OPTION, allow_memory=True) == Path(name)
