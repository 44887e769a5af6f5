from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sleepbackends.control import Control, Progress
from sleepbackends.errors import (
    ContentsLostError,
    MechanismError,
    StorageError,
    StorageFullError,
    TransitionTimeoutError,
)
from sleepbackends.host.backend import HostBackend
from sleepbackends.host.options import HostOptions
from sleepbackends.host.spool import Chunk, Spool
from sleepbackends.hostmemory.rollup import rollup_bytes
from sleepbackends.residency import Residency

CHUNK = 1 << 16
MIB = 1 << 20


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[HostBackend]:
    backend = HostBackend(HostOptions(spool_directory=tmp_path, chunk_bytes=CHUNK, threads=2))
    yield backend
    backend.close()


def filled(backend: HostBackend, tag: str, size_bytes: int) -> np.ndarray[Any, Any]:
    with backend.region(tag) as region:
        array: np.ndarray[Any, Any] = region.empty(size_bytes, "u1")
    array[:] = np.random.default_rng(size_bytes).integers(0, 256, size_bytes, dtype="u1")
    return array


def residencies(backend: HostBackend, tag: str) -> frozenset[Residency]:
    return backend.state().tags[tag].residencies


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("sleepbackends")]


def test_memory_is_given_back_and_returns_bit_exact_at_its_address(backend: HostBackend) -> None:
    arrays = [filled(backend, "weights", n) for n in (1, 4096, CHUNK, 3 * MIB + 1, 64 * MIB)]
    copies = [array.copy() for array in arrays]
    addresses = [array.ctypes.data for array in arrays]
    total = sum(array.nbytes for array in arrays)
    for _ in range(2):
        before = rollup_bytes("Rss")
        report = backend.suspend()
        assert before - rollup_bytes("Rss") > total * 0.9
        assert report.released_bytes == report.copied_bytes == total
        backend.resume()
        assert rollup_bytes("Rss") > before - total * 0.1
        assert [array.ctypes.data for array in arrays] == addresses
        assert all(map(np.array_equal, arrays, copies))


def test_nan_payloads_survive(backend: HostBackend) -> None:
    with backend.region("weights") as region:
        tensor = region.empty(1 << 16, torch.bfloat16)
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    tensor.view(torch.int16)[:] = bits
    backend.suspend()
    backend.resume()
    assert torch.equal(tensor.view(torch.int16), bits)


def test_tags_sleep_and_wake_alone(backend: HostBackend) -> None:
    weights, cache = filled(backend, "weights", MIB), filled(backend, "kv_cache", MIB)
    copy = weights.copy()
    backend.suspend()
    assert residencies(backend, "kv_cache") == {Residency.DISCARDED}
    backend.resume(["weights"])
    assert np.array_equal(weights, copy)
    assert residencies(backend, "kv_cache") == {Residency.DISCARDED}
    backend.resume(["kv_cache"])
    assert not cache.any()


def test_freeing_asleep_memory_gives_its_storage_back(backend: HostBackend) -> None:
    first, second = filled(backend, "weights", 2 * MIB), filled(backend, "weights", MIB)
    copy = second.copy()
    backend.suspend()
    for spool in backend._spools:
        os.fsync(spool._fd)
    before = stored_bytes(backend)
    del first
    assert before - stored_bytes(backend) == 2 * MIB
    backend.resume()
    assert np.array_equal(second, copy)
    assert stored_bytes(backend) == 0


def stored_bytes(backend: HostBackend) -> int:
    return sum(os.fstat(spool._fd).st_blocks * 512 for spool in backend._spools)


def damage(backend: HostBackend, array: np.ndarray[Any, Any]) -> None:
    """Change one saved byte from outside, as anybody with the right to could."""
    chunk = backend._saved[array.ctypes.data][-1]
    [link] = [
        path
        for path in Path("/proc/self/fd").iterdir()
        if path.name == str(chunk.spool._fd) and "(deleted)" in os.readlink(path)
    ]
    with link.open("r+b") as file:
        file.seek(chunk.slot * CHUNK)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


def test_damaged_bytes_are_never_used(backend: HostBackend) -> None:
    lost = [filled(backend, tag, 3 * CHUNK) for tag in ("weights", "runtime")]
    good = filled(backend, "mine", 5 * CHUNK + 1)
    copy = good.copy()
    addresses = {array.ctypes.data for array in lost}
    backend.suspend()
    for array in lost:
        damage(backend, array)
    with pytest.raises(ContentsLostError, match="2 block") as caught:
        backend.resume()
    assert caught.value.addresses == addresses
    assert caught.value.tags == {"weights", "runtime"}
    assert residencies(backend, "weights") == {Residency.DISCARDED}
    assert residencies(backend, "runtime") == {Residency.DISCARDED}
    assert residencies(backend, "mine") == {Residency.OFFLOADED}
    assert backend.resume().undefined_tags == {"weights", "runtime"}
    assert np.array_equal(good, copy)
    assert not lost[0].any()


def test_two_backends_need_two_directories(backend: HostBackend, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="in use by another backend"):
        HostBackend(HostOptions(spool_directory=tmp_path))
    backend.close()
    HostBackend(HostOptions(spool_directory=tmp_path)).close()


def test_a_directory_that_takes_no_file_is_unlocked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise StorageError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "__init__", fail)
        with pytest.raises(StorageError, match="no"):
            HostBackend(HostOptions(spool_directory=tmp_path))
    HostBackend(HostOptions(spool_directory=tmp_path)).close()


def test_any_number_of_backends_share_the_default_directory() -> None:
    backends = [HostBackend() for _ in range(3)]
    arrays = [filled(backend, "weights", 1000) for backend in backends]
    copies = [array.copy() for array in arrays]
    for backend in backends:
        backend.suspend()
    for backend in backends:
        backend.resume()
        backend.close()
    assert all(map(np.array_equal, arrays, copies))


def test_close_drops_everything(backend: HostBackend, tmp_path: Path) -> None:
    array = filled(backend, "weights", MIB)
    backend.suspend()
    backend.close()
    backend.close()
    assert not list(tmp_path.iterdir())
    for spool in backend._spools:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(spool._fd)
    del array
    assert backend.state().tags["weights"].blocks == 0


def test_a_full_file_system_is_seen_before_anything_is_copied(
    backend: HostBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = filled(backend, "weights", 100_000)
    copy = array.copy()
    monkeypatch.setattr(Spool, "available_bytes", lambda self: 99_999)
    monkeypatch.setattr(Spool, "write", pytest.fail)
    with pytest.raises(StorageFullError) as caught:
        backend.suspend()
    assert caught.value.needed_bytes >= 100_000
    assert caught.value.available_bytes == 99_999
    assert np.array_equal(array, copy)


Failure = Callable[[pytest.MonkeyPatch], type[Exception]]


def no_space(patch: pytest.MonkeyPatch) -> type[Exception]:
    write, calls = os.pwrite, iter(range(10))

    def fail(fd: int, data: memoryview, offset: int) -> int:
        if next(calls) == 5:
            raise OSError(28, "No space left on device")
        return write(fd, data, offset)

    patch.setattr(os, "pwrite", fail)
    return StorageFullError


def broken_code(patch: pytest.MonkeyPatch) -> type[Exception]:
    write = Spool.write

    def fail(self: Spool, chunk: Chunk, data: memoryview) -> None:
        if chunk.slot == 5:
            raise RuntimeError("a defect")
        write(self, chunk, data)

    patch.setattr(Spool, "write", fail)
    return MechanismError


@pytest.mark.parametrize("failure", [no_space, broken_code])
def test_a_failed_suspend_changes_nothing(
    backend: HostBackend, monkeypatch: pytest.MonkeyPatch, failure: Failure
) -> None:
    arrays = [filled(backend, "weights", 3 * CHUNK + n) for n in range(3)]
    copies = [array.copy() for array in arrays]
    with monkeypatch.context() as patch:
        kind = failure(patch)
        with pytest.raises(kind):
            backend.suspend()
    assert residencies(backend, "weights") == {Residency.RESIDENT}
    assert all(map(np.array_equal, arrays, copies))
    assert not backend._saved
    assert stored_bytes(backend) == 0
    assert not threads()
    backend.suspend()
    backend.resume()
    assert all(map(np.array_equal, arrays, copies))


def test_the_deadline_is_met_between_chunks_and_no_thread_works_on(
    backend: HostBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = filled(backend, "weights", 400 * CHUNK)
    copy = array.copy()
    write, written = Spool.write, []

    def slowly(self: Spool, chunk: Chunk, data: memoryview) -> None:
        time.sleep(0.02)
        write(self, chunk, data)
        written.append(chunk)

    monkeypatch.setattr(Spool, "write", slowly)
    with pytest.raises(TransitionTimeoutError):
        backend.suspend(control=Control(timeout_s=0.1))
    assert not threads()
    assert 0 < len(written) < 200
    assert np.array_equal(array, copy)


def test_progress_is_told_by_chunks_in_the_caller_s_thread(backend: HostBackend) -> None:
    array = filled(backend, "weights", 4 * CHUNK + 1)
    seen: list[Progress] = []
    callers: set[int] = set()

    def look(progress: Progress) -> None:
        seen.append(progress)
        callers.add(threading.get_ident())

    backend.suspend(control=Control(on_progress=look))
    assert [p.done_bytes for p in seen] == [0, CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK, array.nbytes]
    assert callers == {threading.get_ident()}


def test_a_process_killed_asleep_leaves_nothing_and_no_lock(tmp_path: Path) -> None:
    code = f"""
import os, signal
from sleepbackends.host.backend import HostBackend
from sleepbackends.host.options import HostOptions
backend = HostBackend(HostOptions(spool_directory={str(tmp_path)!r}))
with backend.region("weights") as region:
    buffer = region.buffer(1000)
backend.suspend()
print("asleep", flush=True)
{{}}
"""
    kill = code.format("os.kill(os.getpid(), signal.SIGKILL)")
    done = subprocess.run([sys.executable, "-c", kill], capture_output=True, check=False)
    assert (done.stdout, done.returncode) == (b"asleep\n", -signal.SIGKILL)
    assert not list(tmp_path.iterdir())
    touch = code.format("buffer[0]")
    done = subprocess.run([sys.executable, "-c", touch], capture_output=True, check=False)
    assert (done.stdout, done.returncode) == (b"asleep\n", -signal.SIGSEGV)


def test_an_ordinary_exit_asleep_is_quiet() -> None:
    code = """
from sleepbackends.host.backend import HostBackend
backend = HostBackend()
with backend.region("weights") as region:
    buffer, array = region.buffer(1000), region.empty(10, "f4")
backend.suspend()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stderr == b""


def test_probe_says_on_other_systems_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HostBackend.probe().ok
    monkeypatch.setattr(platform, "system", lambda: "Plan9")
    availability = HostBackend.probe()
    assert not availability
    assert "Plan9" in availability.reason
    assert availability.hint
