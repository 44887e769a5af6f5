from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.errors import StorageError, StorageFullError
from sleepbackends.host.spool import Chunk, Spool
from sleepbackends.hostmemory import driver

CHUNK = 1 << 16


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool(tmp_path, CHUNK, drop_page_cache=False)
    yield spool
    spool.close()


def save(spool: Spool, data: bytes) -> list[Chunk]:
    chunks = spool.allot(len(data))
    for number, chunk in enumerate(chunks):
        start = number * CHUNK
        spool.write(chunk, memoryview(data[start : start + chunk.size_bytes]))
    return chunks


def load(spool: Spool, chunks: list[Chunk]) -> bytes | None:
    parts = [bytearray(chunk.size_bytes) for chunk in chunks]
    intact = [spool.read(c, memoryview(p)) for c, p in zip(chunks, parts, strict=True)]
    return b"".join(parts) if all(intact) else None


@pytest.mark.parametrize("size_bytes", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
@pytest.mark.parametrize("drop_page_cache", [False, True])
def test_what_is_read_is_what_was_written(
    tmp_path: Path, size_bytes: int, drop_page_cache: bool
) -> None:
    spool = Spool(tmp_path, CHUNK, drop_page_cache=drop_page_cache)
    data = os.urandom(size_bytes)
    assert load(spool, save(spool, data)) == data
    spool.close()


def test_the_file_is_unnamed_private_and_gone_after_close(tmp_path: Path, spool: Spool) -> None:
    save(spool, b"x" * 100)
    assert not list(tmp_path.iterdir())
    status = os.fstat(spool._fd)
    assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
    assert not os.get_inheritable(spool._fd)
    spool.close()
    spool.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(spool._fd)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR, None])
def test_without_unnamed_files_the_name_is_removed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    if number is None:
        monkeypatch.delattr(os, "O_TMPFILE")
    else:
        unnamed, real = os.O_TMPFILE, os.open

        def refuse(path: Any, flags: int, *mode: int) -> int:
            if flags & unnamed == unnamed:
                raise OSError(number, "no unnamed files here")
            return real(path, flags, *mode)

        monkeypatch.setattr(os, "open", refuse)
    spool = Spool(tmp_path, CHUNK, drop_page_cache=False)
    assert not list(tmp_path.iterdir())
    assert load(spool, save(spool, b"abc")) == b"abc"
    spool.close()


def test_the_page_cache_is_dropped_where_asked(tmp_path: Path) -> None:
    def is_cached(spool: Spool) -> bool:
        try:
            return os.preadv(spool._fd, [bytearray(1)], 0, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False

    def saved_and_cached(drop: bool) -> bool:
        spool = Spool(tmp_path, CHUNK, drop_page_cache=drop)
        try:
            save(spool, b"x" * CHUNK)
            return is_cached(spool)
        except OSError as error:
            pytest.skip(f"this file system does not tell: {error}")
        finally:
            spool.close()

    assert saved_and_cached(False)
    # Advice: a page that another processor still holds for a moment is not dropped.
    assert not all(saved_and_cached(True) for _ in range(20))


def test_slots_are_reused_and_storage_is_given_back(spool: Spool) -> None:
    def used_bytes() -> int:
        os.fsync(spool._fd)
        return os.fstat(spool._fd).st_blocks * 512

    kept = save(spool, b"k" * CHUNK)
    for _ in range(20):
        first, second = save(spool, b"1" * 3 * CHUNK), save(spool, b"2" * 2 * CHUNK)
        spool.give_back(first)
        third = save(spool, b"3" * 3 * CHUNK)
        assert os.fstat(spool._fd).st_size <= 6 * CHUNK
        assert used_bytes() <= 6 * CHUNK + 4096
        assert load(spool, second) == b"2" * 2 * CHUNK
        assert load(spool, third) == b"3" * 3 * CHUNK
        spool.give_back(second)
        spool.give_back(third)
        assert used_bytes() <= CHUNK + 4096
    assert load(spool, kept) == b"k" * CHUNK
    spool.give_back(kept)
    assert os.fstat(spool._fd).st_size == 0


def test_slots_are_reused_where_files_have_no_holes(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "punch_hole", lambda *part: False)
    kept = save(spool, b"k")
    for _ in range(5):
        spool.give_back(save(spool, b"x" * 2 * CHUNK))
    assert os.fstat(spool._fd).st_size == 3 * CHUNK

    def refuse(fd: int, size_bytes: int) -> None:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse)
        spool.give_back(kept)
    assert load(spool, save(spool, b"y" * 3 * CHUNK)) == b"y" * 3 * CHUNK
    assert os.fstat(spool._fd).st_size == 3 * CHUNK


def flip(fd: int, chunk: Chunk) -> None:
    offset = chunk.slot * CHUNK + chunk.size_bytes // 2
    byte = os.pread(fd, 1, offset)[0]
    os.pwrite(fd, bytes([byte ^ 1]), offset)


def cut(fd: int, chunk: Chunk) -> None:
    os.ftruncate(fd, chunk.slot * CHUNK + chunk.size_bytes // 2)


def zero(fd: int, chunk: Chunk) -> None:
    os.pwrite(fd, bytes(chunk.size_bytes), chunk.slot * CHUNK)


@pytest.mark.parametrize("damage", [flip, cut, zero])
def test_damage_is_seen(spool: Spool, damage: Callable[[int, Chunk], None]) -> None:
    chunks = save(spool, b"x" * 2 * CHUNK)
    damage(spool._fd, chunks[1])
    assert spool.read(chunks[0], memoryview(bytearray(CHUNK)))
    assert not spool.read(chunks[1], memoryview(bytearray(CHUNK)))


def test_the_hash_cannot_be_computed_without_the_secret(tmp_path: Path) -> None:
    first, second = (Spool(tmp_path, CHUNK, drop_page_cache=False) for _ in range(2))
    assert save(first, b"same")[0].digest != save(second, b"same")[0].digest
    first.close()
    second.close()


def test_short_writes_and_reads_are_continued(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:999], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, to, offset: read(fd, [to[0][:777]], offset))
    data = os.urandom(CHUNK + 5)
    assert load(spool, save(spool, data)) == data


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StorageFullError),
        (errno.EDQUOT, StorageFullError),
        (errno.EFBIG, StorageFullError),
        (errno.EIO, StorageError),
    ],
)
def test_failed_writes_say_what_kind_of_failure(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def fail(*what: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(kind, match=os.strerror(number)) as caught:
        save(spool, b"x" * 10)
    assert str(spool.directory) in str(caught.value)
    if isinstance(caught.value, StorageFullError):
        assert caught.value.needed_bytes == 10


def test_a_write_of_nothing_is_not_repeated_for_ever(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *what: 0)
    with pytest.raises(StorageError, match="nothing was written"):
        save(spool, b"x")


def test_failed_reads_are_storage_errors_and_can_be_repeated(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = save(spool, b"abc")

    def fail(*what: Any) -> int:
        raise OSError(errno.EIO, "bad sector")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(StorageError, match="bad sector") as caught:
            load(spool, chunks)
    assert caught.value.recoverable
    assert load(spool, chunks) == b"abc"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_full_file_system_is_storage_full(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        spool = Spool(tmp_path, CHUNK, drop_page_cache=False)
        assert spool.available_bytes() == 256 << 10
        with pytest.raises(StorageFullError) as caught:
            save(spool, os.urandom(512 << 10))
        assert caught.value.available_bytes < CHUNK
        spool.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)  # noqa: S607


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_can_neither_use_nor_damage_the_spool(spool: Spool) -> None:
    chunks = save(spool, b"x" * 100)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            spool.give_back(chunks)
            try:
                spool.allot(1)
            except StorageError:
                code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert load(spool, chunks) == b"x" * 100


def test_giving_back_after_close_does_nothing(spool: Spool) -> None:
    chunks = save(spool, b"x")
    spool.close()
    spool.give_back(chunks)


def test_a_directory_that_takes_no_files_is_refused() -> None:
    with pytest.raises(StorageError, match="/proc"):
        Spool(Path("/proc"), CHUNK, drop_page_cache=False)


def test_nothing_is_left_after_the_process_was_killed(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from sleepbackends.host.spool import Spool
spool = Spool(Path({str(tmp_path)!r}), {CHUNK}, drop_page_cache=True)
[chunk] = spool.allot(100)
spool.write(chunk, memoryview(bytes(100)))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -9
    assert not list(tmp_path.iterdir())
