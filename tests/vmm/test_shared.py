"""Shared files: found, made, compared, never trusted blindly, removed when nobody uses them."""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.errors import StorageError
from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm import shared as module
from sleepbackends.vmm.shared import Shared, SharedStore

SIZE = 3 * 4096 + 5


class Users:
    """Offers bytes to stores of one directory, and ends what is mapped with the test."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self.store = SharedStore(parent)
        self.store.open()
        self._kept: list[Any] = []
        self._mapped: list[Shared] = []

    def offer(self, data: bytes) -> Shared | None:
        buffer = ctypes.create_string_buffer(data, len(data))
        self._kept.append(buffer)
        store = SharedStore(self.parent)
        shared = store.offer(ctypes.addressof(buffer), len(data), 7)
        if shared is not None:
            assert ctypes.string_at(shared.address, len(data)) == data
            self._mapped.append(shared)
        return shared

    def leave(self) -> None:
        """Go as a process goes that is killed: the files stay."""
        while self._mapped:
            shared = self._mapped.pop()
            host.release(shared.address, host.round_up(shared.size_bytes))

    def forget(self) -> None:
        self._mapped.clear()

    def file(self) -> Path:
        (copy,) = self.store.copies()
        return self.store.directory / copy.name


@pytest.fixture
def users(tmp_path: Path) -> Iterator[Users]:
    users = Users(tmp_path)
    yield users
    users.leave()


DATA = bytes(range(256)) * 48 + b"shard"


def test_the_same_bytes_are_one_file_as_long_as_somebody_uses_it(users: Users) -> None:
    assert len(DATA) == SIZE
    first, second = users.offer(DATA), users.offer(DATA)
    assert first is not None
    assert second is not None
    assert first.address != second.address
    (copy,) = users.store.copies()
    assert (copy.size_bytes, copy.in_use) == (SIZE, True)
    status = users.file().stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 1
    assert stat.S_IMODE(users.store.directory.stat().st_mode) == 0o700
    assert users.store.clean() == 0
    users.leave()
    assert [copy.in_use for copy in users.store.copies()] == [False]
    assert users.store.clean() == SIZE
    assert users.store.copies() == []


def test_the_last_one_to_leave_removes_the_file(users: Users) -> None:
    first, second = users.offer(DATA), users.offer(DATA)
    for shared, left in ((first, 1), (second, 0)):
        assert shared is not None
        users.store.leave(shared)
        assert len(users.store.copies()) == left
    users.forget()


def test_one_byte_makes_a_difference(users: Users) -> None:
    users.offer(DATA)
    users.offer(DATA[:-1] + b"!")
    users.offer(DATA + b"!")
    assert len(users.store.copies()) == 3


def test_a_damaged_file_is_replaced(users: Users) -> None:
    users.offer(DATA)
    users.leave()
    with users.file().open("r+b") as file:
        file.seek(100)
        file.write(b"!")
    assert users.offer(DATA) is None
    assert users.offer(DATA) is not None


def test_a_damaged_file_that_somebody_uses_stays_and_is_not_trusted(users: Users) -> None:
    users.offer(DATA)
    with users.file().open("r+b") as file:
        file.write(b"!")
    assert users.offer(DATA) is None
    assert len(users.store.copies()) == 1


@pytest.mark.parametrize("size_bytes", [0, SIZE - 1, SIZE + 1])
def test_a_file_of_another_size_is_not_mapped(users: Users, size_bytes: int) -> None:
    users.offer(DATA)
    users.leave()
    os.truncate(users.file(), size_bytes)
    assert users.offer(DATA) is None
    assert users.offer(DATA) is not None


def test_a_file_of_somebody_else_is_not_trusted(
    users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    users.offer(DATA)
    users.file().chmod(0o640)
    assert users.offer(DATA) is None
    users.file().chmod(0o600)
    assert users.offer(DATA) is not None
    directory = users.store.directory
    users.store = SharedStore(users.parent)
    monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
    with pytest.raises(StorageError, match="this user alone"):
        users.store.clean()


def test_a_link_is_not_followed(users: Users, tmp_path: Path) -> None:
    users.offer(DATA)
    users.leave()
    name = users.file()
    name.rename(tmp_path / "elsewhere")
    name.symlink_to(tmp_path / "elsewhere")
    assert users.offer(DATA) is None
    assert users.store.copies() == []
    assert users.store.clean() == 0
    assert name.is_symlink()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_can_enter_is_refused(users: Users, mode: int) -> None:
    users.store.directory.chmod(mode)
    with pytest.raises(StorageError, match="this user alone") as caught:
        SharedStore(users.parent).open()
    assert "share_directory" in caught.value.hint


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    store = SharedStore(tmp_path)
    store.directory.symlink_to(tmp_path)
    with pytest.raises(StorageError, match="this user alone"):
        store.open()
    with pytest.raises(StorageError, match="cannot be created"):
        SharedStore(tmp_path / "missing").open()
    assert SharedStore(tmp_path / "missing").copies() == []


def test_a_full_file_system_only_means_no_sharing(
    users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, data: memoryview, offset: int) -> None:
        os.pwrite(fd, data[:100], offset)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_all", refuse)
        assert users.offer(DATA) is None
        assert list(users.store.directory.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(module, "LEFT_FREE", 1)
        assert users.offer(DATA) is None
    assert users.offer(DATA) is not None


def test_what_was_never_finished_is_removed(users: Users) -> None:
    left = users.store.directory / ".new-abc"
    left.write_bytes(b"half")
    foreign = users.store.directory / "notes"
    foreign.write_bytes(b"mine")
    SharedStore(users.parent).open()
    assert not left.exists()
    assert foreign.exists(), "only files of this store are removed"


def test_whoever_comes_second_uses_the_file_of_the_first(
    users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = SharedStore._opened
    missed: list[int] = []

    def too_early(self: SharedStore, name: str, size_bytes: int) -> int | None:
        if not missed:
            missed.append(size_bytes)
            users.offer(DATA)
            return None
        return opened(self, name, size_bytes)

    monkeypatch.setattr(SharedStore, "_opened", too_early)
    assert users.offer(DATA) is not None
    assert len(os.listdir(users.store.directory)) == 1
    assert users.file().stat().st_nlink == 1


def test_a_file_that_is_being_removed_is_left_alone(users: Users) -> None:
    users.offer(DATA)
    users.leave()
    with users.file().open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert users.offer(DATA) is None
    assert users.offer(DATA) is not None
