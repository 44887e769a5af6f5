"""Processes with equal weights keep one copy, and none ever wakes with other bytes than its own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.errors import HostMemoryError, StorageError
from sleepbackends.vmm import copies, saving
from sleepbackends.vmm.region import DeviceMemory
from sleepbackends.vmm.segment import Range
from sleepbackends.vmm.shared import SharedStore
from sleepbackends.vmm.shared_arena import SharedArena, is_shared
from tests.cumem.test_backend import Make, filled, make
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.cuda import Simulator, build, environment
from tests.waiting import until

__all__ = ["make"]

CHUNK = GRANULE_BYTES
WEIGHTS = random.Random(5).randbytes(40 * CHUNK + 123)  # noqa: S311 - test data


# Asleep, with its own bytes shared and nothing private left; then it does as it is told.
NEIGHBOUR = """
import sys, time
from pathlib import Path
from sleepbackends.vmm import address_space, copies
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
address_space._FOLDER = Path(sys.argv[1])
copies.CHUNK_BYTES = int(sys.argv[3])
data = Path(sys.argv[4]).read_bytes()
backend = CumemBackend(CumemOptions(share_copies=True, share_directory=sys.argv[2]))
with backend.region("weights") as region:
    memory = region.buffer(len(data))
memory.write(data)
backend.suspend(1)
give_up = time.monotonic() + 60
while backend._store.held_bytes and time.monotonic() < give_up:
    time.sleep(0.01)
print(backend._store.held_bytes, backend._store.shared_bytes, flush=True)
input()
backend.resume()
print(memory.read() == data, flush=True)
backend.close()
"""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def store(tmp_path: Path) -> SharedStore:
    return SharedStore(tmp_path)


@pytest.fixture
def sharing(make: Make, tmp_path: Path) -> Callable[[], CumemBackend]:
    return lambda: make(share_copies=True, share_directory=tmp_path)


def arena(backend: CumemBackend) -> SharedArena:
    assert isinstance(backend._store, SharedArena)
    return backend._store


def put_to_sleep(backend: CumemBackend, private_bytes: int = 0) -> None:
    backend.suspend(1)
    until(lambda: arena(backend).held_bytes == private_bytes)


def weights(backend: CumemBackend) -> DeviceMemory:
    with backend.region("weights") as region:
        memory = region.buffer(len(WEIGHTS))
    memory.write(WEIGHTS)
    return memory


@pytest.fixture
def neighbour(
    simulator: Simulator, native_library: Path, tmp_path: Path
) -> Callable[[], subprocess.Popen[str]]:
    def start() -> subprocess.Popen[str]:
        data = tmp_path / "weights"
        data.write_bytes(WEIGHTS)
        arguments = [native_library.parent, tmp_path, CHUNK, data]
        process = subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR, *map(str, arguments)],
            env=environment(build().parent),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["0", str(len(WEIGHTS))]
        return process

    return start


def test_two_processes_keep_one_copy(
    sharing: Callable[[], CumemBackend],
    neighbour: Callable[[], subprocess.Popen[str]],
    store: SharedStore,
) -> None:
    process = neighbour()
    backend = sharing()
    memory = weights(backend)
    put_to_sleep(backend)
    assert arena(backend).shared_bytes == len(WEIGHTS)
    assert sum(copy.size_bytes for copy in store.copies()) == len(WEIGHTS)
    assert process.communicate("wake\n")[0] == "True\n"
    backend.resume()
    assert memory.read() == WEIGHTS
    assert backend.suspend(1).copied_bytes == 0, "shared chunks are clean too"
    backend.close()
    assert store.copies() == []


def test_a_process_is_killed_asleep(
    sharing: Callable[[], CumemBackend],
    neighbour: Callable[[], subprocess.Popen[str]],
    store: SharedStore,
) -> None:
    process = neighbour()
    backend = sharing()
    memory = weights(backend)
    put_to_sleep(backend)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert store.clean() == 0
    backend.resume()
    assert memory.read() == WEIGHTS
    backend.close()
    assert store.copies() == []


def test_what_the_last_one_left_goes_when_the_next_one_starts(
    sharing: Callable[[], CumemBackend],
    neighbour: Callable[[], subprocess.Popen[str]],
    store: SharedStore,
) -> None:
    process = neighbour()
    process.kill()
    process.communicate()
    assert {copy.in_use for copy in store.copies()} == {False}
    sharing()
    assert store.copies() == []


def test_a_shared_chunk_is_never_written(
    sharing: Callable[[], CumemBackend], store: SharedStore
) -> None:
    one, other = sharing(), sharing()
    memory = [weights(one), weights(other)]
    put_to_sleep(one)
    put_to_sleep(other)
    one.resume()
    changed = bytearray(WEIGHTS)
    changed[3 * CHUNK + 7] ^= 1
    changed[-1] ^= 1
    memory[0].write(bytes(changed))
    report = one.suspend(1)
    assert 0 < report.copied_bytes <= 2 * CHUNK
    until(lambda: arena(one).held_bytes == 0)
    other.resume()
    one.resume()
    assert memory[1].read() == WEIGHTS
    assert memory[0].read() == bytes(changed)
    assert len(store.copies()) == -(-len(WEIGHTS) // CHUNK) + 2
    put_to_sleep(other)
    other.close()
    assert sum(copy.size_bytes for copy in store.copies()) == len(WEIGHTS), "others were left over"


def test_no_room_for_what_changed_undoes_the_sleep(
    sharing: Callable[[], CumemBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = sharing()
    memory = weights(backend)
    put_to_sleep(backend)
    backend.resume()
    changed = WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 1])
    memory.write(changed)

    def refuse(more: int) -> None:
        raise HostMemoryError("no memory", needed_bytes=more)

    with monkeypatch.context() as patch:
        patch.setattr(
            arena(backend), "_check_room", lambda more: refuse(more) if more > 0 else None
        )
        with pytest.raises(HostMemoryError, match="no memory"):
            backend.suspend(1)
    assert memory.read() == changed
    put_to_sleep(backend)
    backend.resume()
    assert memory.read() == changed


def test_what_is_saved_anew_while_it_is_being_shared_stays_private(
    sharing: Callable[[], CumemBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = sharing()
    memory = weights(backend)
    share, late = SharedArena.share, list[Range | None]()

    def overtaken(self: SharedArena, saved: Range, fingerprint: int) -> Range | None:
        shared = share(self, saved, fingerprint)
        if not late:
            late.append(shared)
            backend.resume()
            memory.write(WEIGHTS[::-1])
            backend.suspend(1)
        return shared

    monkeypatch.setattr(SharedArena, "share", overtaken)
    backend.suspend(1)
    until(lambda: bool(late) and arena(backend).held_bytes == 0)
    assert late[0] is not None, "there was something to take back"
    backend.resume()
    assert memory.read() == WEIGHTS[::-1]


def test_staged_copies_are_shared(sharing: Callable[[], CumemBackend]) -> None:
    backend = sharing()
    memory = weights(backend)
    for data in (WEIGHTS, WEIGHTS[::-1]):
        memory.write(data)
        assert backend.stage().wait(60).copied_bytes == len(WEIGHTS)
        until(lambda: arena(backend).held_bytes == 0)
        assert backend.suspend(1).copied_bytes == 0
        backend.resume()
        assert memory.read() == data


def test_what_a_user_looks_at_stays(sharing: Callable[[], CumemBackend]) -> None:
    backend = sharing()
    memory = filled(backend, "weights", CHUNK, 3)
    put_to_sleep(backend)
    view = backend.host_copy(memory.address, CHUNK)
    backend.resume()
    backend.trim()
    assert view == b"\x03" * CHUNK
    assert arena(backend).shared_bytes == CHUNK, "kept for the view"
    view.release()
    backend.trim()
    assert arena(backend).shared_bytes == 0


def test_private_bytes_that_a_user_looks_at_stay(
    sharing: Callable[[], CumemBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = sharing()
    memory = filled(backend, "weights", CHUNK, 3)
    share, views = SharedArena.share, list[memoryview]()

    def look(self: SharedArena, saved: Range, fingerprint: int) -> Range | None:
        shared = share(self, saved, fingerprint)
        views.append(backend.host_copy(memory.address, CHUNK))
        return shared

    with monkeypatch.context() as patch:
        patch.setattr(SharedArena, "share", look)
        backend.suspend(1)
        until(lambda: bool(views) and arena(backend).shared_bytes == 0)
    assert arena(backend).used_bytes == CHUNK
    assert views[0] == b"\x03" * CHUNK
    views.clear()
    backend.resume()
    put_to_sleep(backend)


def test_pinning_a_file_is_refused(
    sharing: Callable[[], CumemBackend], store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = sharing()
    memory = weights(backend)
    refused: list[int] = []
    pin = backend.cuda.pin

    def refuse_files(address: int, size_bytes: int) -> None:
        if size_bytes > CHUNK:
            return pin(address, size_bytes)
        refused.append(size_bytes)
        raise HostMemoryError("not these")

    monkeypatch.setattr(backend.cuda, "pin", refuse_files)
    backend.suspend(1)
    until(lambda: sum(refused) >= len(WEIGHTS) and not store.copies())
    assert arena(backend).shared_bytes == 0
    backend.resume()
    assert memory.read() == WEIGHTS


@pytest.mark.parametrize("fault", [StorageError("no"), HostMemoryError("no"), OSError(28, "full")])
def test_a_store_that_fails_leaves_everything_private(
    sharing: Callable[[], CumemBackend], monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    def fail(self: SharedStore, name: str, data: memoryview) -> int:
        raise fault

    monkeypatch.setattr(SharedStore, "_mapped", fail)
    backend = sharing()
    memory = weights(backend)
    backend.suspend(1)
    backend.resume()
    assert backend.suspend(1).copied_bytes == 0
    assert arena(backend).held_bytes >= len(WEIGHTS)
    backend.resume()
    assert memory.read() == WEIGHTS


@pytest.mark.parametrize(
    "options",
    [
        {"share_copies": True, "tier": "disk"},
        {"share_copies": True, "retention": "none"},
        {"share_copies": True, "retention": "release"},
        {"share_directory": "/dev/shm"},  # noqa: S108 - not used
    ],
)
def test_what_cannot_be_had_together_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="share_"):
        CumemOptions.model_validate(options)


def test_a_chunk_that_was_to_be_written_anew_is_not_taken_for_saved(
    sharing: Callable[[], CumemBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has private room by then, and nothing in it."""
    backend = sharing()
    memory = weights(backend)
    put_to_sleep(backend)
    backend.resume()
    memory.write(WEIGHTS[::-1])

    def fail(batch: saving.Batch) -> None:
        raise StorageError("too late")

    with monkeypatch.context() as patch:
        patch.setattr(saving.Batch, "work", fail)
        with pytest.raises(StorageError, match="too late"):
            backend.suspend(1)
    memory.write(WEIGHTS)
    assert backend.suspend(1).copied_bytes == len(WEIGHTS)
    backend.resume()
    assert memory.read() == WEIGHTS


def test_room_that_cannot_grow_takes_nothing(
    sharing: Callable[[], CumemBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = sharing()
    filled(backend, "weights", CHUNK, 3)
    put_to_sleep(backend)
    (copy,) = backend._copies.all()
    (private,) = arena(backend).take([100])
    rooms, sizes = [copy.chunks[0].room, private.ranges], [CHUNK, 200]
    used = arena(backend).used_bytes

    def refuse(*_: object, **__: object) -> None:
        raise HostMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(SharedArena, "take", refuse)
        with pytest.raises(HostMemoryError, match="no memory"):
            arena(backend).writable(rooms, sizes)
    assert arena(backend).used_bytes == used
    moved, grown = arena(backend).writable(rooms, sizes)
    assert [sum(part.size_bytes for part in room) for room in (moved, grown)] == [CHUNK, 200]
    assert grown[0] is private.ranges[0]
    assert not any(is_shared(part) for part in moved)
