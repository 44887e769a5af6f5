"""Sleeping memory goes to another process, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sleepbackends import (
    ContentsLostError,
    HostMemoryError,
    PolicyConflictError,
    Residency,
    StorageError,
    UnknownTagError,
)

from sleepbackends_memfd.backend import MemfdBackend
from sleepbackends_memfd.passing import receive, send
from sleepbackends_memfd.sealed import SealedFile

Pair = tuple[socket.socket, socket.socket]

GIVER = """
import socket, sys
from sleepbackends_memfd.backend import MemfdBackend

backend = MemfdBackend()
with backend.region("weights") as region:
    buffers = [region.buffer(size) for size in (100_003, 5)]
for number, buffer in enumerate(buffers):
    buffer[:] = bytes([number + 1]) * len(buffer)
backend.suspend(1)
backend.hand_over(socket.socket(fileno=int(sys.argv[1])), ["weights"])
"""

TAKER = """
import hashlib, socket, sys
from sleepbackends_memfd.backend import MemfdBackend

backend = MemfdBackend()
(weights,) = backend.take_over(socket.socket(fileno=int(sys.argv[1])))["weights"]
print(hashlib.sha256(weights).hexdigest(), backend.state().tags["weights"].resident_bytes)
weights[:1] = b"changed here only"[:1]
"""


def noise(size_bytes: int) -> bytes:
    return random.Random(size_bytes).randbytes(size_bytes)  # noqa: S311 - test data


def start(script: str, end: socket.socket) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, str(end.fileno())]
    return subprocess.Popen(  # noqa: S603 - our own script
        command, pass_fds=[end.fileno()], stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.fixture
def backend() -> Iterator[MemfdBackend]:
    backend = MemfdBackend()
    yield backend
    backend.close()


def asleep(backend: MemfdBackend, *sizes: int) -> list[memoryview]:
    with backend.region("weights") as region:
        buffers = [region.buffer(size) for size in sizes]
    for buffer in buffers:
        buffer[:] = noise(len(buffer))
    backend.suspend(1)
    return buffers


def test_another_process_takes_what_sleeps_here(backend: MemfdBackend, pair: Pair) -> None:
    (weights,) = asleep(backend, 300_001)
    here, there = pair
    taker = start(TAKER, there)
    assert backend.hand_over(here, ["weights"]) == 300_001
    said, _ = taker.communicate(timeout=60)
    assert said.split() == [hashlib.sha256(noise(300_001)).hexdigest(), "300001"]
    backend.resume()
    assert weights == noise(300_001), "what the other one wrote is its own"


def test_what_was_handed_over_outlives_the_giver(backend: MemfdBackend, pair: Pair) -> None:
    here, there = pair
    giver = start(GIVER, there)
    giver.communicate(timeout=60)
    assert giver.returncode == 0
    taken = backend.take_over(here)["weights"]
    assert taken == [b"\1" * 100_003, b"\2" * 5]
    backend.suspend(1)
    backend.resume()
    assert taken[0] == b"\1" * 100_003, "it sleeps and wakes like any other"


def test_more_files_than_can_be_passed_at_once(backend: MemfdBackend, pair: Pair) -> None:
    buffers = asleep(backend, *range(1, 451))
    here, there = pair
    backend.hand_over(here, ["weights"])
    other = MemfdBackend()
    taken = other.take_over(there)["weights"]
    assert [bytes(each) for each in taken] == [noise(size) for size in range(1, 451)]
    other.close()
    assert len(buffers) == 450


def test_nobody_can_change_a_file(backend: MemfdBackend) -> None:
    buffers = asleep(backend, 5000)
    (file,) = backend._files.values()
    assert file.is_sealed
    with pytest.raises(PermissionError):
        os.pwrite(file.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(file.fd, 1)
    assert buffers


def test_memory_that_is_awake_or_dropped_is_not_handed_over(
    backend: MemfdBackend, pair: Pair
) -> None:
    here, there = pair
    buffers = asleep(backend, 5000)
    with backend.region("kv_cache") as region:
        buffers.append(region.buffer(10))
    for tags, error in (
        (["weights", "kv_cache"], PolicyConflictError),
        (["typo"], UnknownTagError),
    ):
        with pytest.raises(error):
            backend.hand_over(here, tags)
    backend.resume()
    with pytest.raises(PolicyConflictError, match="not all of it is offloaded"):
        backend.hand_over(here, ["weights"])
    there.setblocking(False)
    with pytest.raises(BlockingIOError):
        there.recv(1)


def test_a_file_that_can_still_be_changed_is_refused(backend: MemfdBackend, pair: Pair) -> None:
    here, there = pair
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.write(fd, b"12345")
    send(here, {"weights": [SealedFile(fd, 5, b"")]})
    with pytest.raises(StorageError, match="can still be changed"):
        backend.take_over(there)
    assert not backend.state().tags


def test_a_file_that_is_no_file_in_memory_is_refused(
    backend: MemfdBackend, pair: Pair, tmp_path: Path
) -> None:
    here, there = pair
    (tmp_path / "file").write_bytes(b"12345")
    send(here, {"weights": [SealedFile(os.open(tmp_path / "file", os.O_RDONLY), 5, b"")]})
    with pytest.raises(StorageError, match="can still be changed"):
        backend.take_over(there)


def test_bytes_that_are_not_what_was_saved_are_refused(backend: MemfdBackend, pair: Pair) -> None:
    here, there = pair
    good = SealedFile.of([memoryview(b"good")], lambda _: None)
    wrong = SealedFile.of([memoryview(b"wrong")], lambda _: None)
    wrong.digest = good.digest
    send(here, {"weights": [good, wrong]})
    with pytest.raises(ContentsLostError, match="5 bytes of tag 'weights'"):
        backend.take_over(there)
    assert backend.state().tags["weights"].blocks == 0, "nothing is left allocated"


def test_without_room_nothing_is_taken(
    backend: MemfdBackend, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    send(here, {"weights": [SealedFile.of([memoryview(b"data")], lambda _: None)]})

    def refuse(size_bytes: int) -> None:
        raise HostMemoryError("no room", needed_bytes=size_bytes)

    monkeypatch.setattr(backend, "check_room", refuse)
    with pytest.raises(HostMemoryError):
        backend.take_over(there)
    assert not backend.state().tags


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\xff" * 8,
        b"\x02" + b"\0" * 7 + b"[]",
        b"\x04" + b"\0" * 7 + b"nope",
        b"\x10" + b"\0" * 7 + b'{"w": [[1, 2]]} ',
        b"\x13" + b"\0" * 7 + b'{"w": [[1, "ff"]]} ',
    ],
    ids=["closed", "huge", "list", "garbled", "ill-typed", "no files"],
)
def test_what_is_not_a_hand_over_is_refused(pair: Pair, sent: bytes) -> None:
    here, there = pair
    here.sendall(sent)
    here.shutdown(socket.SHUT_WR)
    with pytest.raises(StorageError, match="cannot be taken"):
        receive(there)


def test_a_closed_connection_is_told_and_changes_nothing(backend: MemfdBackend, pair: Pair) -> None:
    buffers = asleep(backend, 5000)
    here, there = pair
    there.close()
    with pytest.raises(StorageError, match="does not take"):
        backend.hand_over(here, ["weights"])
    assert backend.state().tags["weights"].residencies == {Residency.OFFLOADED}
    backend.resume()
    assert buffers[0] == noise(5000)


def test_files_are_closed_when_nobody_needs_them(backend: MemfdBackend) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    buffers = asleep(backend, *[10_000] * 20)
    assert count() == before + 20
    backend.resume()
    assert count() == before
    backend.suspend(1)
    backend.close()
    assert count() == before
    assert len(buffers) == 20


def test_other_systems_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MemfdBackend.probe()
    monkeypatch.delattr(os, "memfd_create")
    answer = MemfdBackend.probe()
    assert not answer
    assert answer.hint
