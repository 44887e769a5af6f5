"""Staging that packs: what is kept is what was packed, and the engine misses no memory for it."""

from __future__ import annotations

import ctypes
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.errors import MechanismError
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.reports import StagingReport
from sleepbackends.vmm import places, staging
from sleepbackends.vmm.packing import packer
from tests.cumem.packed_sleeps import (
    CHUNK,
    SLOTS,
    TABLES_BYTES,
    Filled,
    held_on_device,
    saved_as,
    small_chunks,
)
from tests.cumem.test_backend import Make, make
from tests.cumem.test_staging import paused
from tests.simulators.cuda import Simulator

__all__ = ["make", "small_chunks"]

KEEP = TagPolicy(Policy.KEEP, Policy.KEEP)


@pytest.fixture(autouse=True)
def small_steps(small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "MOST_SLOTS", 2 * SLOTS)
    monkeypatch.setattr(staging, "STEP_CHUNKS", 5)


def stage(backend: CumemBackend, **options: Any) -> StagingReport:
    report: StagingReport = backend.stage(limit_gib_s=1000.0, **options).wait(60)
    return report


@pytest.mark.parametrize("tier", ["memory", "disk", "shared"])
def test_the_first_sleep_finds_everything_saved_and_packed(
    simulator: Simulator,
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tier: str,
) -> None:
    monkeypatch.setattr(places, "BUFFER_BYTES", CHUNK)
    options: dict[str, dict[str, Any]] = {
        "memory": {},
        "disk": {"tier": "disk", "disk_directory": tmp_path},
        "shared": {"share_copies": True, "share_directory": tmp_path},
    }
    backend = make(verify="resume", **options[tier])
    filled = [Filled(backend, "weights", 9), Filled(backend, "random", 3, 2)]
    report = stage(backend)
    assert report.copied_bytes == 12 * CHUNK
    assert 0.25 * 9 * CHUNK < report.spared_bytes < 0.35 * 9 * CHUNK
    assert held_on_device(simulator) == TABLES_BYTES + 12 * CHUNK, "slots are given back"
    assert sorted(saved_as(backend)) == [False] * 3 + [True] * 9
    slept = backend.suspend(1)
    assert (slept.copied_bytes, slept.clean_bytes) == (0, 12 * CHUNK)
    assert backend.resume().spared_bytes == report.spared_bytes
    assert all(each.is_as_written() for each in filled)
    assert stage(backend).clean_bytes == 12 * CHUNK
    filled[0].refill("random", 3)
    assert stage(backend).copied_bytes == 9 * CHUNK
    assert backend.suspend(1).copied_bytes == 0
    backend.resume()
    assert all(each.is_as_written() for each in filled)


@pytest.mark.parametrize("step", [1, 4])
def test_an_engine_that_keeps_writing(
    make: Make, simulator: Simulator, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Torn copies, escapes that come and go, values changed and changed back."""
    monkeypatch.setattr(staging, "STEP_CHUNKS", step)
    backend = make()
    filled = Filled(backend, "weights", 6)
    simulator.set_copy_rate(400 << 20)
    chooser = random.Random(step)  # noqa: S311 - not for secrets
    stop = threading.Event()
    packed = 0

    def write(pause_s: float) -> None:
        while not stop.wait(pause_s):
            at, byte = chooser.randrange(6 * CHUNK), chooser.randrange(256)
            place = ctypes.c_ubyte.from_address(filled.address + at)
            before = place.value
            place.value = byte
            if chooser.random() < 0.5:
                place.value = before

    for number in range(8):
        filled.refill("weights", number)
        # The last of four leaves time to pack what is not torn, and is waited for.
        writer = threading.Thread(target=write, args=((0.0, 1e-3, 0.0, 0.1)[number % 4],))
        stop.clear()
        writer.start()
        going = backend.stage(limit_gib_s=1000.0)
        if number % 4 == 3 or chooser.random() < 0.7:
            packed += going.wait(60).spared_bytes
        stop.set()
        writer.join()
        expected = filled.memory.read()
        backend.suspend(1)
        backend.resume()
        assert filled.memory.read() == expected
        going.wait(60)
    assert packed, "nothing was packed"


def test_where_little_memory_is_left_it_does_not_pack(simulator: Simulator, make: Make) -> None:
    backend = make()
    filled = Filled(backend, "weights", 6)
    backend.suspend(1)
    backend.resume()
    filled.refill("weights", 2)
    created = simulator.calls("cuMemCreate")
    # Room for the slots, and not for what is to be left besides.
    simulator.set_budget_bytes(held_on_device(simulator) + 2 * SLOTS * CHUNK)
    report = stage(backend)
    assert (report.copied_bytes, report.spared_bytes) == (6 * CHUNK, 0)
    assert simulator.calls("cuMemCreate") == created
    assert backend.suspend(1).clean_bytes == 6 * CHUNK
    backend.resume()
    assert filled.is_as_written()


@pytest.mark.parametrize("how", ["pause", "suspend", "resume"])
def test_whoever_needs_the_memory_gets_that_of_the_slots(
    simulator: Simulator, make: Make, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    backend = make()
    filled = [Filled(backend, "weights", 12), Filled(backend, "weights", 4, 2, tag="lora")]
    policies = Policies({"weights": KEEP})
    if how == "resume":
        backend.suspend(1, policies=policies)
    reached, go_on = threading.Event(), threading.Event()
    real = staging.Staging._wait_for

    def wait_for(self: staging.Staging, hashing: Any) -> None:
        real(self, hashing)
        reached.set()
        assert go_on.wait(60)

    monkeypatch.setattr(staging.Staging, "_wait_for", wait_for)
    going = backend.stage(limit_gib_s=1000.0)
    assert reached.wait(60)
    awake = TABLES_BYTES + (12 if how == "resume" else 16) * CHUNK
    assert held_on_device(simulator) > awake, "it has slots"
    if how == "pause":
        going.pause()
        go_on.set()
        for _ in range(1000):
            if held_on_device(simulator) == awake:
                break
            threading.Event().wait(0.01)
        assert held_on_device(simulator) == awake
        going.proceed()
    elif how == "suspend":
        backend.suspend(1)
        assert held_on_device(simulator) == TABLES_BYTES
        go_on.set()
    else:
        simulator.set_budget_bytes(awake + 4 * CHUNK)
        backend.resume()
        go_on.set()
    going.wait(60)
    backend.resume()
    assert all(each.is_as_written() for each in filled)


def test_a_device_that_fails_while_it_looks_at_what_was_packed(
    simulator: Simulator, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MechanismError("it broke")

    backend = make()
    filled = Filled(backend, "weights", 6)
    with monkeypatch.context() as patch:
        patch.setattr(staging, "fingerprints_of_packed", fail)
        with pytest.raises(MechanismError, match="it broke"):
            stage(backend)
    assert held_on_device(simulator) > TABLES_BYTES + 6 * CHUNK, "the slots may be in use"
    backend.suspend(1)
    assert held_on_device(simulator) == TABLES_BYTES
    backend.resume()
    assert filled.is_as_written()


def test_a_device_that_does_not_fingerprint_what_was_packed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    filled = Filled(backend, "weights", 6)
    with monkeypatch.context() as patch:
        patch.setattr(backend.cuda, "fingerprint", lambda *_: None)
        assert stage(backend).spared_bytes > 0
    assert backend.suspend(1).clean_bytes == 6 * CHUNK, "the host did"
    backend.resume()
    assert filled.is_as_written()


def test_closing_gives_the_slots_back(
    simulator: Simulator, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    filled = Filled(backend, "weights", 20)
    going = paused(backend, monkeypatch)
    closing = threading.Thread(target=backend.close)
    closing.start()
    going.go_on.set()
    closing.join(60)
    assert held_on_device(simulator) == 20 * CHUNK
    assert filled.is_as_written()
