"""Another process holds the memory that a resume needs."""

from __future__ import annotations

import threading
import time

import pytest

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.errors import DeviceMemoryError
from sleepbackends.settings import BackendSettings

from .helpers import GIB, SLACK, free_device_bytes, holds, let_go, neighbour, pattern

COUNT = 16
SIZE_BYTES = 256 << 20
NEEDED_BYTES = COUNT * SIZE_BYTES
"""4 GiB, while the neighbour leaves one or two."""


def populate(backend: CumemBackend) -> list[object]:
    with backend.region("weights"):
        tensors = [pattern(SIZE_BYTES, seed) for seed in range(COUNT)]
    with backend.region("lora"):
        small = pattern(1 << 20, COUNT)
    return [*tensors, small]


def intact(tensors: list[object]) -> bool:
    return all(holds(tensor, seed) for seed, tensor in enumerate(tensors))  # type: ignore[arg-type]


def test_a_resume_without_room_leaves_everything_asleep_and_can_be_repeated(
    backend: CumemBackend,
) -> None:
    tensors = populate(backend)
    backend.suspend(1)
    asleep = backend.state()
    with neighbour(leave_bytes=GIB) as process:
        free = free_device_bytes()
        assert free < NEEDED_BYTES
        for _ in range(3):
            with pytest.raises(DeviceMemoryError) as caught:
                backend.resume()
            assert caught.value.needed_bytes >= NEEDED_BYTES
            assert abs(caught.value.available_bytes - free) < SLACK
            assert caught.value.recoverable
            assert backend.state() == asleep
            assert abs(free_device_bytes() - free) < SLACK
        # What there is room for can come back.
        backend.resume(["lora"])
        assert backend.state().asleep_tags() == {"weights"}
        let_go(process)
    assert backend.resume().changed
    assert intact(tensors)


def test_a_resume_waits_for_its_neighbour() -> None:
    backend = CumemBackend(settings=BackendSettings(wait_for_memory_s=60))
    tensors = populate(backend)
    backend.suspend(1)
    with neighbour(leave_bytes=GIB) as process:
        timer = threading.Timer(2.0, let_go, [process])
        started = time.perf_counter()
        timer.start()
        assert backend.resume().changed
        assert 1.9 < time.perf_counter() - started < 30
        timer.join()
    assert intact(tensors)
    backend.close()


def test_it_waits_no_longer_than_it_was_told() -> None:
    backend = CumemBackend(settings=BackendSettings(wait_for_memory_s=0.5))
    tensors = populate(backend)
    backend.suspend(1)
    with neighbour(leave_bytes=GIB) as process:
        started = time.perf_counter()
        with pytest.raises(DeviceMemoryError) as caught:
            backend.resume()
        assert 0.5 <= time.perf_counter() - started < 5
        assert any("0.5 s" in note for note in caught.value.__notes__)
        let_go(process)
    backend.resume()
    assert intact(tensors)
    backend.close()
