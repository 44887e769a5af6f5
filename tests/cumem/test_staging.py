"""Copies made beside the engine: of use however they end, never taken for what they are not."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.errors import ClosedError, HostMemoryError, RequestError
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.vmm import copies, staging
from tests.cumem.test_backend import Make, filled, holds, make
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.cuda import Simulator

__all__ = ["make"]

CHUNK = GRANULE_BYTES
STEP = 4 * CHUNK
MANY = 1 << 30


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(staging, "STEP_BYTES", STEP)


def stage(backend: CumemBackend, **options: Any) -> Any:
    return backend.stage(limit_gib_s=MANY, **options)


@pytest.mark.parametrize("background", [True, False])
def test_the_first_sleep_finds_everything_saved(make: Make, background: bool) -> None:
    backend = make(verify="resume")
    memory = [filled(backend, "weights", 5 * CHUNK, 1), filled(backend, "kv_cache", 9 * CHUNK, 2)]
    report = stage(backend, background=background).wait(60)
    assert (report.copied_bytes, report.clean_bytes, report.skipped_bytes) == (5 * CHUNK, 0, 0)
    slept = backend.suspend(1)
    assert (slept.copied_bytes, slept.clean_bytes) == (0, 5 * CHUNK)
    backend.resume()
    assert holds(memory[0], 1)
    report = stage(backend).wait(60)
    assert (report.copied_bytes, report.clean_bytes) == (0, 5 * CHUNK)
    ctypes.memset(memory[0].address + CHUNK, 7, 1)
    report = stage(backend).wait(60)
    assert (report.copied_bytes, report.clean_bytes) == (CHUNK, 4 * CHUNK)


def test_only_some_tags(make: Make) -> None:
    backend = make()
    filled(backend, "weights", CHUNK, 1)
    filled(backend, "lora", CHUNK, 2)
    assert stage(backend, tags=["lora"]).wait(60).copied_bytes == CHUNK
    assert backend.suspend(1).clean_bytes == CHUNK
    assert stage(backend).wait(60).copied_bytes == 0, "what is asleep is left alone"


@pytest.mark.parametrize("step", [1, 3])
def test_an_engine_that_keeps_writing(
    make: Make, simulator: Simulator, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Torn copies, and values changed and changed back while they are copied."""
    monkeypatch.setattr(staging, "STEP_CHUNKS", step)
    backend = make()
    memory = filled(backend, "weights", 6 * CHUNK, 1)
    simulator.set_copy_rate(400 << 20)
    chooser = random.Random(step)  # noqa: S311 - not for secrets
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            at, byte = chooser.randrange(6 * CHUNK), chooser.randrange(256)
            place = ctypes.c_ubyte.from_address(memory.address + at)
            before = place.value
            place.value = byte
            if chooser.random() < 0.5:
                place.value = before

    for _ in range(25):
        writer = threading.Thread(target=write)
        stop.clear()
        writer.start()
        going = stage(backend)
        if chooser.random() < 0.7:
            going.wait(60)
        stop.set()
        writer.join()
        expected = memory.read()
        backend.suspend(1)
        backend.resume()
        assert memory.read() == expected
        going.wait(60)


def test_transitions_and_frees_beside_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STEP_CHUNKS", 1)
    backend = make(share_below_bytes=0)
    memory = {i: filled(backend, "weights", 2 * CHUNK, i) for i in range(8)}
    for number in range(20):
        going = stage(backend)
        backend.suspend(1)
        freed = memory.pop(min(memory))
        freed.free()
        backend.resume()
        memory[100 + number] = filled(backend, "weights", 2 * CHUNK, 100 + number)
        going.wait(60)
        assert all(holds(each, i) for i, each in memory.items())


def paused(backend: CumemBackend, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A staging that stops in its first step until it is told to go on."""
    reached, go_on = threading.Event(), threading.Event()
    real = staging.Staging._step

    def step(self: staging.Staging, *args: Any) -> Any:
        reached.set()
        assert go_on.wait(60)
        return real(self, *args)

    monkeypatch.setattr(staging.Staging, "_step", step)
    going = stage(backend)
    assert reached.wait(60)
    going.go_on = go_on
    return going


def test_it_can_be_cancelled(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    memory = filled(backend, "weights", 20 * CHUNK, 1)
    going = paused(backend, monkeypatch)
    assert not going.done
    with pytest.raises(TimeoutError):
        going.wait(0)
    going.cancel()
    going.go_on.set()
    report = going.wait(60)
    assert report.copied_bytes == STEP
    assert backend.suspend(1).clean_bytes == report.copied_bytes, "what was staged is of use"
    backend.resume()
    assert holds(memory, 1)


def test_a_new_one_ends_the_one_before(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    filled(backend, "weights", 20 * CHUNK, 1)
    first = paused(backend, monkeypatch)
    first.pause()
    first.go_on.set()
    second = stage(backend).wait(60)
    assert first.done
    assert second.copied_bytes + second.clean_bytes == 20 * CHUNK


def test_it_pauses_on_demand(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    filled(backend, "weights", 20 * CHUNK, 1)
    going = paused(backend, monkeypatch)
    going.pause()
    going.go_on.set()
    time.sleep(0.1)
    assert not going.done
    going.proceed()
    assert going.wait(60).copied_bytes == 20 * CHUNK


def test_closing_ends_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    memory = filled(backend, "weights", 20 * CHUNK, 1)
    going = paused(backend, monkeypatch)
    closing = threading.Thread(target=backend.close)
    closing.start()
    going.go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    assert going.done
    assert backend._store.held_bytes == 0
    assert holds(memory, 1)
    with pytest.raises(ClosedError):
        stage(backend)


def test_the_bandwidth_is_bounded(make: Make) -> None:
    backend = make()
    filled(backend, "weights", 16 * CHUNK, 1)
    started = time.perf_counter()
    backend.stage(limit_gib_s=16 * CHUNK / (1 << 30) / 0.3).wait(60)
    assert time.perf_counter() - started > 0.2


@pytest.mark.parametrize("refuse", ["prepare", "take"])
def test_no_room_on_the_host(make: Make, monkeypatch: pytest.MonkeyPatch, refuse: str) -> None:
    def nothing(*_: object, **__: object) -> None:
        raise HostMemoryError("nothing left")

    backend = make()
    memory = filled(backend, "weights", 4 * CHUNK, 1)
    where: Any = backend._copies if refuse == "prepare" else backend._store
    with monkeypatch.context() as patch:
        patch.setattr(where, refuse, nothing)
        with pytest.raises(HostMemoryError):
            stage(backend).wait(60)
    assert stage(backend).wait(60).copied_bytes == 4 * CHUNK
    assert holds(memory, 1)


def test_requests_that_make_no_sense(make: Make) -> None:
    backend = make()
    calls: list[Callable[[], object]] = [
        lambda: backend.stage(limit_gib_s=0),
        lambda: backend.stage(limit_gib_s=float("nan")),
        lambda: backend.stage(["nobody"]),
        lambda: backend.stage("weights"),
    ]
    for call in calls:
        with pytest.raises(RequestError):
            call()
    assert backend.stage().wait(60).copied_bytes == 0


def test_policies_say_what_is_staged(make: Make) -> None:
    backend = make()
    backend.settings = type(backend.settings)(
        policies=Policies({"kv_cache": TagPolicy(Policy.OFFLOAD, Policy.DISCARD)})
    )
    filled(backend, "kv_cache", CHUNK, 1)
    filled(backend, "scratch", CHUNK, 1)
    policies = backend.settings.policies
    expected = sum(CHUNK for t in ("kv_cache", "scratch") if policies.at(t, 1) is Policy.OFFLOAD)
    assert stage(backend).wait(60).copied_bytes == expected


def test_a_fingerprint_that_comes_too_late_is_not_noted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleep in between has saved other bytes over those that were looked at."""
    reached, go_on = threading.Event(), threading.Event()
    real = staging.Staging._wait_for

    def wait_for(self: staging.Staging, hashing: Any) -> None:
        real(self, hashing)
        reached.set()
        assert go_on.wait(60)

    backend = make()
    memory = filled(backend, "weights", CHUNK, 1)
    with monkeypatch.context() as patch:
        patch.setattr(staging.Staging, "_wait_for", wait_for)
        going = stage(backend)
        assert reached.wait(60)
        memory.write(bytes([2]) * CHUNK)
        backend.suspend(1)
        backend.resume()
        go_on.set()
        assert going.wait(60).skipped_bytes == CHUNK
    memory.write(bytes([1]) * CHUNK)
    assert backend.suspend(1).copied_bytes == CHUNK
    backend.resume()
    assert holds(memory, 1)
