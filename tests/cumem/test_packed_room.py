"""Room for packed bytes on the host, and device memory to pack in: guessed, grown, done without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.cumem import packing as cuda_packing
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.batches import Found
from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.errors import DeviceMemoryError, HostMemoryError, NoRoomError
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.vmm import disk, places, saving
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.joined import Joined
from sleepbackends.vmm.packing.layout import Choice, Layout
from tests.cumem.packed_sleeps import (
    CHUNK,
    TABLES_BYTES,
    Filled,
    chunks_of,
    held_on_device,
    saved_as,
    small_chunks,
)
from tests.cumem.test_backend import Make, make
from tests.packing import contents
from tests.simulators.cuda import Simulator

__all__ = ["make", "small_chunks"]

pytestmark = pytest.mark.usefixtures("small_chunks")

KEEP = TagPolicy(Policy.KEEP, Policy.KEEP)
WHOLE = 16
PACKED = 12 * CHUNK
"""More than 16 chunks of weights are packed to, and less than they are."""


def slept_once(backend: CumemBackend, chunks: float = 1) -> None:
    """Have it take what it keeps for itself."""
    other = Filled(backend, "random", chunks, tag="other")
    backend.suspend(1)
    backend.resume()
    other.memory.free()
    backend.trim()


@pytest.fixture
def misleading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that let expect half of what there is."""
    real = Choice.packed_bytes
    monkeypatch.setattr(Choice, "packed_bytes", lambda self, size: real(self, size) // 2)


# Host room


def test_what_fits_packed_is_not_refused(make: Make) -> None:
    backend = make(host_budget_bytes=PACKED)
    filled = Filled(backend, "weights", WHOLE)
    for kind, fits in (("weights", True), ("random", False), ("fp32", False), ("weights", True)):
        filled.refill(kind, 5)
        backend.trim()
        if fits:
            backend.suspend(1)
            assert backend._store.held_bytes <= PACKED
            backend.resume()
        else:
            before = backend.state()
            with pytest.raises(HostMemoryError, match="budget"):
                backend.suspend(1)
            assert backend.state() == before
            assert backend._store.used_bytes == 0, "refused before anything was taken"
        assert filled.is_as_written()


def test_spare_copies_make_room_for_packed_ones(make: Make) -> None:
    backend = make(host_budget_bytes=PACKED)
    one = Filled(backend, "weights", WHOLE)
    other = Filled(backend, "weights", WHOLE, 2, tag="lora")
    for tag, kept in (("weights", "lora"), ("lora", "weights"), ("weights", "lora")):
        report = backend.suspend(1, policies=Policies({kept: KEEP}))
        assert report.copied_bytes == WHOLE * CHUNK
        backend.resume([tag])
    assert one.is_as_written()
    assert other.is_as_written()


def test_copies_that_outgrow_their_room_and_find_none(make: Make) -> None:
    """They had room for what was packed; what is there now is found out only by looking at it."""
    backend = make(host_budget_bytes=PACKED)
    filled = Filled(backend, "weights", WHOLE)
    backend.suspend(1)
    backend.resume()
    filled.refill("random")
    before = backend.state()
    with pytest.raises(HostMemoryError, match="budget"):
        backend.suspend(1)
    assert backend.state() == before
    assert filled.is_as_written()
    filled.refill("weights", 7)
    backend.suspend(1)
    backend.resume()
    assert filled.is_as_written()


@pytest.mark.usefixtures("misleading")
@pytest.mark.parametrize("tier", ["memory", "disk", "shared"])
def test_a_guess_that_was_too_low(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    monkeypatch.setattr(places, "BUFFER_BYTES", CHUNK)
    options: dict[str, dict[str, Any]] = {
        "memory": {},
        "disk": {"tier": "disk", "disk_directory": tmp_path},
        "shared": {"share_copies": True, "share_directory": tmp_path},
    }
    backend = make(**options[tier])
    filled = Filled(backend, "weights", WHOLE)
    for kind in ("weights", "random", "weights", "fp32"):
        backend.suspend(1)
        grown = [chunk for chunk in chunks_of(backend) if isinstance(chunk.saved, Joined)]
        assert grown, "no chunk needed more than it had"
        assert backend._store.used_bytes <= (WHOLE + 1) * CHUNK
        for start in (9, CHUNK - 100):
            view = backend.host_copy(filled.address + start, 2 * CHUNK)
            assert view == filled.data[start : start + 2 * CHUNK]
            view.release()
        backend.resume()
        assert filled.is_as_written()
        filled.refill(kind, 9)


@pytest.mark.usefixtures("misleading")
def test_a_guess_that_was_too_low_and_no_room_for_more(make: Make) -> None:
    backend = make(host_budget_bytes=PACKED // 2)
    filled = Filled(backend, "weights", WHOLE)
    before = backend.state()
    with pytest.raises(HostMemoryError, match="budget"):
        backend.suspend(1)
    assert backend.state() == before
    assert filled.is_as_written()


@pytest.mark.parametrize("staged", [False, True])
def test_what_would_take_more_packed_is_copied_as_it_is(
    make: Make, monkeypatch: pytest.MonkeyPatch, staged: bool
) -> None:
    """However large the slots are, and whatever a sample lets hope for."""
    hope = Choice(Layout(2, 1, 0), 0)

    def survey(_: cuda_packing.CudaPacking, spans: Sequence[Span]) -> Found[list[Choice]]:
        return Found([hope] * len(spans))

    monkeypatch.setattr(cuda_packing.CudaPacking, "survey", survey)
    backend = make(share_below_bytes=0)
    filled = [Filled(backend, "random", 0.6), Filled(backend, "constant", 1)]
    filled[1].write(bytes(CHUNK))
    if staged:
        backend.stage(background=False, limit_gib_s=1000.0).wait(60)
    backend.suspend(1)
    assert sorted(saved_as(backend)) == [False, True]
    backend.resume()
    assert all(each.is_as_written() for each in filled)


def test_a_disk_with_room_for_the_packed_bytes_only(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "BUFFER_BYTES", CHUNK)
    monkeypatch.setattr(disk, "available_bytes", lambda directory: PACKED)
    backend = make(tier="disk", disk_directory=tmp_path)
    filled = Filled(backend, "weights", WHOLE)
    backend.suspend(1)
    backend.resume()
    assert filled.is_as_written()
    filled.refill("random")
    backend.trim()
    with pytest.raises(NoRoomError):
        backend.suspend(1)
    assert filled.is_as_written()


# Device memory


def leave(simulator: Simulator, free_bytes: int) -> None:
    simulator.set_budget_bytes(held_on_device(simulator) + free_bytes)


@pytest.mark.parametrize("granules", range(5))
def test_with_little_device_memory_it_packs_with_few_slots_or_none(
    simulator: Simulator, make: Make, granules: int
) -> None:
    backend = make()
    slept_once(backend)
    filled = Filled(backend, "weights", WHOLE)
    leave(simulator, granules * CHUNK)
    for seed in (1, 2):
        filled.refill("weights", seed)
        down = backend.suspend(1)
        assert (down.spared_bytes > 0) == (granules > 0), "one slot is enough"
        up = backend.resume()
        assert up.spared_bytes == down.spared_bytes
        assert filled.is_as_written()


def test_a_resume_without_slots_unpacks_on_the_host(
    simulator: Simulator, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "BUFFER_BYTES", CHUNK // 4)
    backend = make(verify="resume")
    filled = Filled(backend, "weights", WHOLE)
    other = Filled(backend, "random", WHOLE, tag="other")
    used = held_on_device(simulator)
    backend.suspend(1)
    simulator.set_budget_bytes(used + TABLES_BYTES)  # a neighbour took the rest
    report = backend.resume()
    assert report.spared_bytes == 0
    assert report.copied_bytes == 2 * WHOLE * CHUNK
    assert filled.is_as_written()
    assert other.is_as_written()
    simulator.set_budget_bytes(None)
    assert backend.suspend(1).clean_bytes == 2 * WHOLE * CHUNK
    assert backend.resume().spared_bytes > 0
    assert filled.is_as_written()


def test_slots_give_way_to_what_is_woken(simulator: Simulator, make: Make) -> None:
    backend = make()
    slept_once(backend)
    filled = Filled(backend, "weights", WHOLE)
    used = held_on_device(simulator)
    backend.suspend(1)
    simulator.set_budget_bytes(used - 1)
    with pytest.raises(DeviceMemoryError) as caught:
        backend.resume()
    assert caught.value.available_bytes == used - 1 - TABLES_BYTES, "no slots were held"
    simulator.set_budget_bytes(used)
    backend.resume()
    assert filled.is_as_written()


@pytest.mark.parametrize("failing", ["slots", "survey", "count", "lane"])
def test_a_driver_that_cannot_now(
    make: Make, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    backend = make()
    slept_once(backend)
    filled = Filled(backend, "weights", WHOLE)

    def refuse(*_: object) -> None:
        raise DeviceMemoryError("nothing left")

    with monkeypatch.context() as patch:
        if failing == "lane":
            lane = backend.cuda.lane
            patch.setattr(
                backend.cuda,
                "lane",
                lambda device, use: refuse() if use == "pack" else lane(device, use),
            )
        else:
            patch.setattr(cuda_packing.CudaPacking, failing, refuse)
        assert backend.suspend(1).spared_bytes == 0
        backend.resume()
        assert filled.is_as_written()
    filled.refill("weights", 2)
    assert backend.suspend(1).spared_bytes > 0
    backend.resume()
    assert filled.is_as_written()


def test_slots_that_a_driver_does_not_let_go_of_go_later(
    simulator: Simulator, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make()
    slept_once(backend)
    filled = Filled(backend, "weights", WHOLE)
    unmapped = simulator.calls("cuMemUnmap")
    backend.suspend(1)
    nth = simulator.calls("cuMemUnmap") - unmapped
    backend.resume()
    filled.refill("weights", 2)
    simulator.fail("cuMemUnmap", 1, nth)
    backend.suspend(1)
    assert simulator.pending_faults() == 0
    assert "memory of device 0 stays" in caplog.text
    assert held_on_device(simulator) == TABLES_BYTES, "it was tried again at the end"
    backend.resume()
    assert filled.is_as_written()


def test_a_kernel_loaded_first_on_a_full_device_is_not_taken_from_the_sleeper(
    simulator: Simulator, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor once the first blocks were unmapped, which makes room for what it needs."""
    monkeypatch.setattr(saving, "BATCH_CHUNKS", 4)
    backend = make(share_below_bytes=0)
    filled = [Filled(backend, "weights", 2, number) for number in range(WHOLE // 2)]
    with monkeypatch.context() as patch:
        patch.setattr(backend.cuda, "packing", lambda device: None)
        backend.suspend(1)  # what fingerprints need is there from now on
        backend.resume()
    leave(simulator, 0)
    real = cuda_packing.CudaPacking.survey

    def survey(packing: cuda_packing.CudaPacking, spans: Sequence[Span]) -> Any:
        backend.cuda.synchronize(0)  # so that what was copied before is unmapped
        return real(packing, spans)

    monkeypatch.setattr(cuda_packing.CudaPacking, "survey", survey)
    for number, each in enumerate(filled):
        each.refill("weights", 10 + number)
    assert backend.suspend(1).spared_bytes == 0
    backend.resume()
    assert all(each.is_as_written() for each in filled)
    for number, each in enumerate(filled):
        each.refill("weights", 20 + number)
    simulator.set_budget_bytes(None)
    assert backend.suspend(1).spared_bytes > 0


def test_kernels_that_find_no_room_are_not_loaded_in_place_of_the_sleeper(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is some once the first blocks were unmapped, which a resume needs for them."""
    monkeypatch.setattr(saving, "BATCH_CHUNKS", 4)
    backend = make()
    filled = Filled(backend, "weights", WHOLE)
    real, tried = cuda_packing.CudaPacking, list[int]()

    def load(driver: CudaDriver, device: int) -> cuda_packing.CudaPacking:
        tried.append(device)
        if len(tried) % 2:
            raise DeviceMemoryError("nothing left")
        return real(driver, device)

    with monkeypatch.context() as patch:
        patch.setattr(cuda_packing, "CudaPacking", load)
        for number in (1, 2):
            tried.clear()
            assert backend.suspend(1).spared_bytes == 0
            assert tried == [0], "before anything was unmapped"
            backend.resume()
            assert filled.is_as_written()
            filled.refill("weights", 1 + number)
    assert backend.suspend(1).spared_bytes > 0
    backend.resume()
    assert filled.is_as_written()


def test_more_and_less_room_by_turns_is_not_more_than_there_is_of_it(make: Make) -> None:
    backend = make()
    filled = Filled(backend, "weights", 40)
    for number in range(12):
        data = bytearray(filled.data)
        for chunk in range(number % 3, 40, 3):
            kind = ("weights", "random", "constant")[(number + chunk) % 3]
            data[chunk * CHUNK : (chunk + 1) * CHUNK] = contents(kind, CHUNK, number)
        filled.write(bytes(data))
        backend.suspend(1)
        assert backend._store.held_bytes <= 40 * CHUNK * 1.001 + 4096
        assert any(saved_as(backend))
        backend.resume()
        assert filled.is_as_written()
