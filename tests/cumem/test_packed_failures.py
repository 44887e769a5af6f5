"""Packed bytes that were damaged, did not arrive, or of memory that somebody wrote to meanwhile."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.packing import CudaPacking
from sleepbackends.errors import ContentsLostError, MechanismError, SleepBackendsError
from sleepbackends.residency import Residency
from sleepbackends.vmm import places, saving
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.packing.layout import Layout
from sleepbackends.vmm.segment import Range
from tests.cumem.packed_sleeps import (
    CHUNK,
    TABLES_BYTES,
    Filled,
    chunks_of,
    held_on_device,
    small_chunks,
)
from tests.cumem.test_backend import Make, make
from tests.cumem.test_disk_faults import damage
from tests.fingerprints import reference
from tests.packing import contents
from tests.simulators.cuda import Simulator

__all__ = ["make", "small_chunks"]

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture(params=["memory", "disk"])
def tiered(
    request: pytest.FixtureRequest, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Make:
    monkeypatch.setattr(places, "BUFFER_BYTES", CHUNK)
    options: dict[str, Any] = {"share_below_bytes": 0}
    if request.param == "disk":
        options |= {"tier": "disk", "disk_directory": tmp_path}
    return lambda **more: make(**options, **more)


class Writer:
    """Writes over some memory once its escapes were counted, as an engine might."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.over: Filled | None = None
        real = CudaPacking.count

        def count(packing: CudaPacking, spans: Sequence[Span], layouts: Sequence[Layout]) -> Any:
            pending = real(packing, spans, layouts)
            pending.result()
            if self.over is not None and any(span.holds(self.over.address) for span in spans):
                self.over.refill("random", 77)
                self.over = None
            return pending

        monkeypatch.setattr(CudaPacking, "count", count)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Writer:
    return Writer(monkeypatch)


def test_memory_that_is_written_to_while_it_is_packed_stays(
    simulator: Simulator, tiered: Make, writer: Writer
) -> None:
    backend = tiered()
    filled = [Filled(backend, "weights", 6, number) for number in range(3)]
    writer.over = filled[1]
    before = backend.state()
    with pytest.raises(MechanismError, match="changed while it was being packed") as caught:
        backend.suspend(1)
    assert "nobody using the memory" in caught.value.hint
    assert backend.state() == before
    assert held_on_device(simulator) == TABLES_BYTES + 18 * CHUNK, "slots are given back"
    assert all(each.is_as_written() for each in filled)
    backend.suspend(1)
    backend.resume()
    assert all(each.is_as_written() for each in filled)


def test_memory_that_is_written_to_while_it_is_staged_is_saved_later(
    tiered: Make, writer: Writer
) -> None:
    backend = tiered()
    filled = [Filled(backend, "weights", 1, number) for number in range(4)]
    writer.over = filled[2]
    report = backend.stage(background=False, limit_gib_s=1000.0).wait(60)
    assert (report.copied_bytes, report.skipped_bytes) == (3 * CHUNK, CHUNK)
    slept = backend.suspend(1)
    assert (slept.copied_bytes, slept.clean_bytes) == (CHUNK, 3 * CHUNK)
    backend.resume()
    assert all(each.is_as_written() for each in filled)


def test_memory_that_is_written_to_and_still_fits_is_staged_as_it_was_packed(
    make: Make, writer: Writer
) -> None:
    """The fingerprint is that of what was packed, not of what was there before."""
    backend = make()
    filled = Filled(backend, "weights", 1)
    others = contents("weights", CHUNK, 5)
    writer.over = filled
    filled.refill = lambda kind, seed=1: filled.write(others)  # type: ignore[method-assign]
    report = backend.stage(background=False, limit_gib_s=1000.0).wait(60)
    assert report.copied_bytes + report.skipped_bytes == CHUNK
    backend.suspend(1)
    backend.resume()
    assert filled.is_as_written()
    assert filled.data == others


def spoil(backend: CumemBackend, number: int, offset: int) -> None:
    """Change a saved byte of a chunk."""
    saved = chunks_of(backend)[number].saved
    assert isinstance(saved, Range)
    ctypes.c_ubyte.from_address(saved.address + offset).value ^= 0x55


def test_what_a_device_does_not_fingerprint_the_host_does(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make(verify="resume")
    filled = Filled(backend, "weights", 4)
    with monkeypatch.context() as patch:
        patch.setattr(backend.cuda, "fingerprint", lambda *_: None)
        assert backend.suspend(1).spared_bytes > 0
    assert {chunk.fingerprint for chunk in chunks_of(backend)} == {
        reference(filled.data[at : at + CHUNK]) for at in range(0, 4 * CHUNK, CHUNK)
    }
    backend.resume()
    assert filled.is_as_written()


@pytest.mark.parametrize("without_slots", [False, True])
@pytest.mark.parametrize("offset", [0, 8, 16, 40, 9000, 40_000])
def test_packed_bytes_that_were_damaged_are_found(
    simulator: Simulator, make: Make, offset: int, without_slots: bool
) -> None:
    backend = make(verify="resume", share_below_bytes=0)
    sound, bad = Filled(backend, "weights", 3), Filled(backend, "weights", 3, 2, tag="lora")
    used = held_on_device(simulator)
    backend.suspend(1)
    spoil(backend, 4, offset)
    if without_slots:
        simulator.set_budget_bytes(used + TABLES_BYTES)
    with pytest.raises(ContentsLostError) as caught:
        backend.resume()
    assert caught.value.addresses == {bad.address}
    backend.resume()
    assert backend.state().tags["lora"].residencies == {Residency.UNDEFINED}
    assert sound.is_as_written()


@pytest.mark.parametrize("without_slots", [False, True])
def test_a_disk_that_damages_packed_bytes_is_found_always(
    simulator: Simulator,
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without_slots: bool,
) -> None:
    monkeypatch.setattr(places, "BUFFER_BYTES", CHUNK)
    backend = make(tier="disk", disk_directory=tmp_path, share_below_bytes=0)
    bad, sound = Filled(backend, "weights", 3, tag="lora"), Filled(backend, "weights", 3, 2)
    used = held_on_device(simulator)
    backend.suspend(1)
    damage(backend, 1000)
    if without_slots:
        simulator.set_budget_bytes(used + TABLES_BYTES)
    with pytest.raises(ContentsLostError):
        backend.host_copy(bad.address, 10)
    assert backend.host_copy(sound.address, 10) == sound.data[:10]
    with pytest.raises(ContentsLostError) as caught:
        backend.resume()
    assert caught.value.addresses == {bad.address}
    backend.resume()
    assert sound.is_as_written()


def test_bytes_that_did_not_arrive_are_found(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make(verify="resume")
    filled = Filled(backend, "weights", 4)
    backend.suspend(1)
    with monkeypatch.context() as patch:
        patch.setattr(CudaPacking, "unpack", lambda *_: None)
        with pytest.raises(MechanismError, match="other bytes"):
            backend.resume()
    assert backend.state().tags["weights"].residencies == {Residency.OFFLOADED}
    backend.resume()
    assert filled.is_as_written()


@pytest.mark.parametrize("step", ["pack", "unpack"])
@pytest.mark.parametrize("nth", [0, 5])
def test_a_driver_that_refuses_to_pack_or_unpack(
    simulator: Simulator, tiered: Make, monkeypatch: pytest.MonkeyPatch, step: str, nth: int
) -> None:
    backend = tiered()
    filled = [Filled(backend, "weights", 3, number, device=number % 2) for number in range(4)]
    if step == "unpack":
        backend.suspend(1)
    before = backend.state()
    real, calls = getattr(CudaPacking, step), iter(range(99))

    def refuse(packing: CudaPacking, *arguments: Any) -> None:
        if next(calls) == nth:
            raise MechanismError("refused")
        real(packing, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(CudaPacking, step, refuse)
        with pytest.raises(SleepBackendsError, match="refused"):
            backend.suspend(1) if step == "pack" else backend.resume()
    assert backend.state() == before
    if step == "pack":
        backend.suspend(1)
    backend.resume()
    assert all(each.is_as_written() for each in filled)
    for device in (0, 1):
        assert held_on_device(simulator, device) == TABLES_BYTES + 6 * CHUNK


def test_slots_that_may_be_in_use_bring_nothing_back(
    simulator: Simulator, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a suspend had unmapped comes back through slots that its own kernels are done with."""
    monkeypatch.setattr(saving, "BATCH_CHUNKS", 4)
    backend = make(share_below_bytes=0)
    filled = [Filled(backend, "weights", 2, number) for number in range(8)]
    backend.suspend(1)
    backend.resume()
    for number, each in enumerate(filled):
        each.refill("weights", 10 + number)
    real, calls = CudaPacking.pack, iter(range(99))

    def pack(packing: CudaPacking, *arguments: Any) -> None:
        number = next(calls)
        if number == 7:
            backend.cuda.synchronize(0)  # so that four chunks are unmapped
        elif number == 8:
            simulator.set_copy_rate(30 << 20)
            simulator.fail("cuMemcpyDtoHAsync", 1, 5)
            simulator.fail("cuStreamSynchronize", 1)
        real(packing, *arguments)

    unpack, settled = CudaPacking.unpack, list[bool]()

    def watch(packing: CudaPacking, *arguments: Any) -> None:
        settled.append(backend._copies.is_settled(0))
        unpack(packing, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(CudaPacking, "pack", pack)
        patch.setattr(CudaPacking, "unpack", watch)
        with pytest.raises(MechanismError) as caught:
            backend.suspend(1)
    assert "waiting for the copies under way failed" in str(caught.value.__notes__)
    del caught
    gc.collect()  # what was raised keeps events
    assert settled, "nothing had been unmapped"
    assert all(settled)
    assert backend.state().asleep_bytes == 0
    assert all(each.is_as_written() for each in filled)


def test_slots_stay_for_as_long_as_the_device_may_use_them(
    simulator: Simulator, make: Make
) -> None:
    """Neither the copies nor the device can be waited for, until they can."""
    backend = make()
    filled = Filled(backend, "weights", 8)
    backend.suspend(1)
    backend.resume()
    filled.refill("weights", 2)
    held = held_on_device(simulator)
    simulator.fail("cuMemcpyDtoHAsync", 1, 5)
    simulator.fail("cuStreamSynchronize", 1, times=None)
    with pytest.raises(MechanismError):
        backend.suspend(1)
    assert not backend._copies.is_settled(0)
    assert held_on_device(simulator) > held, "slots that may be in use are not given back"
    simulator.clear_faults()
    backend.suspend(1)
    assert held_on_device(simulator) == TABLES_BYTES
    backend.resume()
    assert filled.is_as_written()
