"""Replicas with equal weights on one host: one copy between them, whoever is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .helpers import GIB, MIB

Property = Callable[[str, object], None]

WEIGHTS_BYTES = 2 * GIB
PIECES = 8

# Says what it holds of its own before and while it sleeps; then does as it is told.
REPLICA = f"""
import sys, time
import torch
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from tests.gpu.helpers import holds, pattern

def private_bytes():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) << 10

backend = CumemBackend(CumemOptions(share_copies=True, share_directory=sys.argv[1]))
with backend.region("weights"):
    tensors = [pattern({WEIGHTS_BYTES // PIECES}, seed) for seed in range({PIECES})]
torch.cuda.empty_cache()
before = private_bytes()
backend.suspend(1)
give_up = time.monotonic() + 60
while backend._store.held_bytes and time.monotonic() < give_up:
    time.sleep(0.01)
print(private_bytes() - before, backend._store.held_bytes, backend._store.shared_bytes, flush=True)
for line in sys.stdin:
    backend.resume()
    good = all(holds(tensor, seed) for seed, tensor in enumerate(tensors))
    again = backend.suspend(1).copied_bytes
    backend.resume()
    good &= all(holds(tensor, seed) for seed, tensor in enumerate(tensors))
    print(good, again, flush=True)
    break
backend.close()
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in memory, as the option has by default: other files cannot be pinned."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def replica(shared: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", REPLICA, str(shared)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > MIB]


def test_the_second_replica_needs_next_to_nothing(
    replica: Callable[[], subprocess.Popen[str]], shared: Path, record_property: Property
) -> None:
    first = replica()
    assert told(first)[1:] == ["0", str(WEIGHTS_BYTES)]
    second = replica()
    private, held, in_common = map(int, told(second))
    record_property("private_bytes_of_the_second", private)
    assert (held, in_common) == (0, WEIGHTS_BYTES)
    assert private < 0.05 * WEIGHTS_BYTES
    on_disk = sum(path.stat().st_blocks * 512 for path in files(shared))
    assert on_disk <= 1.05 * WEIGHTS_BYTES
    first.send_signal(signal.SIGKILL)
    first.wait()
    out, _ = second.communicate("wake\n", timeout=60)
    assert out.split() == ["True", "0"]
    assert files(shared) == [], "nothing is left behind"


def test_both_wake(replica: Callable[[], subprocess.Popen[str]], shared: Path) -> None:
    processes = [replica(), replica()]
    for process in processes:
        assert told(process)[1:] == ["0", str(WEIGHTS_BYTES)]
    for process in processes:
        assert process.communicate("wake\n", timeout=60)[0].split() == ["True", "0"]
    assert files(shared) == []
