"""Sleeps that pack: the same bytes come back, fewer cross the link and fewer are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sleepbackends.cumem.options import CumemOptions
from sleepbackends.errors import RequestError
from sleepbackends.vmm import places
from sleepbackends.vmm.shared import SharedStore
from sleepbackends.vmm.shared_arena import is_shared
from tests.cumem.packed_sleeps import (
    CHUNK,
    SLOTS,
    TABLES_BYTES,
    Filled,
    chunks_of,
    held_on_device,
    saved_as,
    small_chunks,
)
from tests.cumem.test_backend import Make, make
from tests.packing import CONTENTS, contents
from tests.simulators.cuda import Simulator
from tests.waiting import until

__all__ = ["make", "small_chunks"]

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.mark.parametrize("verify", ["off", "sample", "resume"])
def test_weights_take_fewer_bytes(simulator: Simulator, make: Make, verify: str) -> None:
    backend = make(verify=verify)
    filled = Filled(backend, "weights", 20)
    for _ in range(2):
        report = backend.suspend(1)
        assert (report.copied_bytes, report.clean_bytes) == (20 * CHUNK, 0)
        assert 0.65 < report.packing_ratio < 0.75
        assert report.link_bytes <= backend._store.held_bytes < 0.75 * 20 * CHUNK
        assert held_on_device(simulator) <= TABLES_BYTES, "slots are given back"
        woken = backend.resume()
        assert woken.copied_bytes == 20 * CHUNK
        assert woken.link_bytes == report.link_bytes
        assert held_on_device(simulator) <= TABLES_BYTES + 20 * CHUNK
        assert filled.is_as_written()
        filled.refill("weights", 2)


def test_a_clean_chunk_stays_clean_however_it_is_saved(make: Make) -> None:
    backend = make()
    filled = Filled(backend, "weights", 8)
    raw = Filled(backend, "random", 4)
    backend.suspend(1)
    backend.resume()
    for _ in range(2):
        report = backend.suspend(1)
        assert (report.copied_bytes, report.spared_bytes) == (0, 0)
        assert sorted(saved_as(backend)) == [False] * 4 + [True] * 8
        backend.resume()
    filled.write(filled.data[:-1] + bytes([filled.data[-1] ^ 1]))
    assert backend.suspend(1).copied_bytes == CHUNK
    backend.resume()
    assert filled.is_as_written()
    assert raw.is_as_written()


def test_what_does_not_pack_is_copied_as_it_is(simulator: Simulator, make: Make) -> None:
    backend = make()
    filled = Filled(backend, "random", 20)
    created = simulator.calls("cuMemCreate")
    report = backend.suspend(1)
    assert report.spared_bytes == 0
    assert report.packing_ratio == 1
    assert backend._store.used_bytes == backend._store.held_bytes == 20 * CHUNK
    assert simulator.calls("cuMemCreate") == created, "no slots for nothing"
    created = simulator.calls("cuMemCreate")
    assert backend.resume().spared_bytes == 0
    assert simulator.calls("cuMemCreate") == created + 1, "the memory itself"
    assert filled.is_as_written()


def test_a_block_with_something_of_everything(make: Make) -> None:
    backend = make()
    filled = Filled(backend, "weights", 24)
    filled.write(b"".join(contents(kind, 2 * CHUNK, 3) for kind in CONTENTS))
    backend.suspend(1)
    assert set(saved_as(backend)) == {True, False}, "each chunk by itself"
    backend.resume()
    assert filled.is_as_written()


def test_dirty_chunks_choose_anew(make: Make) -> None:
    backend = make()
    filled = Filled(backend, "constant", 10)
    sizes: list[int] = []
    for kind in ("constant", "weights", "random", "fp32", "constant", "random"):
        filled.refill(kind, len(sizes))
        sizes.append(backend.suspend(1).link_bytes)
        assert backend._store.held_bytes <= 10 * CHUNK + 4096
        backend.resume()
        assert filled.is_as_written()
    assert sizes[0] < sizes[1] < sizes[2] == 10 * CHUNK
    assert sizes[4] == sizes[0]


def test_small_pieces_and_odd_sizes(make: Make) -> None:
    backend = make()
    pieces = [Filled(backend, "weights", 0.01 * (number + 1), number) for number in range(40)]
    pieces += [Filled(backend, "weights", 1.77, 99), Filled(backend, "fp32", 3.003)]
    backend.suspend(1)
    small = [chunk for chunk in chunks_of(backend) if chunk.size_bytes < CHUNK // 4]
    assert small
    assert not any(chunk.is_packed for chunk in small), "not worth the trouble"
    pieces.pop(3).memory.free()
    backend.resume()
    assert all(piece.is_as_written() for piece in pieces)


def test_two_devices(simulator: Simulator, make: Make) -> None:
    backend = make()
    filled = [Filled(backend, "weights", 9, 1 + device, device=device) for device in (0, 1)]
    assert backend.suspend(1).packing_ratio < 0.75
    assert all(held_on_device(simulator, device) <= TABLES_BYTES for device in (0, 1))
    backend.resume()
    assert all(each.is_as_written() for each in filled)


def test_off(simulator: Simulator, make: Make) -> None:
    backend = make(packing="off")
    filled = Filled(backend, "weights", 8)
    report = backend.suspend(1)
    assert report.link_bytes == report.copied_bytes == 8 * CHUNK
    assert simulator.calls("cuModuleLoadData") == 1, "that of the fingerprint"
    backend.resume()
    assert filled.is_as_written()
    with pytest.raises(ValidationError, match="packing"):
        CumemOptions.model_validate({"packing": "always"})


@pytest.mark.usefixtures("no_fingerprints")
def test_without_kernels_nothing_is_packed(make: Make) -> None:
    backend = make()
    filled = Filled(backend, "weights", 8)
    assert backend.suspend(1).spared_bytes == 0
    backend.resume()
    assert filled.is_as_written()


def test_the_host_unpacks_what_it_is_asked_for(make: Make) -> None:
    backend = make()
    filled = Filled(backend, "weights", 6)
    raw = contents("random", 3 * CHUNK, 1)
    filled.write(raw[:CHUNK] + filled.data[: 3 * CHUNK] + raw[CHUNK:])
    backend.suspend(1)
    assert saved_as(backend) == [False, True, True, True, False, False]
    data, address = filled.data, filled.address
    ranges = [(0, 6), (0, 2), (1, 1), (3, 2), (4, 2)]
    cuts = [(3, 10), (CHUNK - 5, 2 * CHUNK), (2 * CHUNK - 1, 3)]
    for start, size in [*((CHUNK * first, CHUNK * count) for first, count in ranges), *cuts]:
        view = backend.host_copy(address + start, size)
        assert view == data[start : start + size]
        assert view.readonly
        view.release()
    with pytest.raises(RequestError, match="not all"):
        backend.host_copy(address, 6 * CHUNK + 1)
    backend.resume()
    assert filled.is_as_written()


def test_plans_and_what_is_staged_tell_how_well_it_packs(make: Make) -> None:
    backend = make()
    assert backend.staged().packing_ratio is None
    Filled(backend, "weights", 8)
    report = backend.suspend(1)
    backend.resume()
    assert backend.staged().packing_ratio == pytest.approx(report.packing_ratio)
    backend.suspend(1)
    assert backend.staged().packing_ratio == pytest.approx(report.packing_ratio), "it was clean"


def test_a_disk_gets_fewer_bytes(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "BUFFER_BYTES", CHUNK)
    backend = make(tier="disk", disk_directory=tmp_path)
    filled = Filled(backend, "weights", 16)
    report = backend.suspend(1)
    assert backend._store.held_bytes <= 0.8 * 16 * CHUNK
    assert backend.host_copy(filled.address + 7, 3 * CHUNK) == filled.data[7 : 7 + 3 * CHUNK]
    assert backend.resume().link_bytes == report.link_bytes < 0.75 * 16 * CHUNK
    assert filled.is_as_written()
    assert backend.suspend(1).clean_bytes == 16 * CHUNK
    backend.resume()
    filled.refill("random")
    backend.suspend(1)
    backend.resume()
    assert filled.is_as_written()


def test_packed_copies_are_shared(make: Make, tmp_path: Path) -> None:
    backends = [make(share_copies=True, share_directory=tmp_path) for _ in range(2)]
    filled = [Filled(backend, "weights", 8) for backend in backends]
    for backend in backends:
        backend.suspend(1)
        store: Any = backend._store
        until(lambda store=store: store.held_bytes == 0)  # type: ignore[misc] # bound at once
        assert all(is_shared(chunk.saved) and chunk.is_packed for chunk in chunks_of(backend))
    files = SharedStore(tmp_path).copies()
    assert len(files) == 8, "both packed them to the same bytes"
    assert sum(file.size_bytes for file in files) < 0.75 * 8 * CHUNK
    for backend, each in zip(backends, filled, strict=True):
        backend.resume()
        assert each.is_as_written()
    filled[0].refill("random")
    backends[0].suspend(1)
    backends[1].suspend(1)
    for backend, each in zip(backends, filled, strict=True):
        backend.resume()
        assert each.is_as_written()


@pytest.mark.parametrize("buffers", [0, 3])
def test_host_memory_that_is_not_pinned(
    simulator: Simulator, make: Make, monkeypatch: pytest.MonkeyPatch, buffers: int
) -> None:
    """Through buffers that are, and through those of the driver."""
    monkeypatch.setattr(places, "BUFFER_BYTES", CHUNK // 4)
    backend = make()
    filled = Filled(backend, "random", 4 * SLOTS)
    backend.suspend(1)  # what the driver itself pins, it has by now
    backend.resume()
    backend.trim()
    pinned = simulator.process_usage().pinned_bytes
    simulator.set_pinned_limit_bytes(pinned + buffers * CHUNK // 4)
    for seed in (2, 3):
        filled.refill("weights", seed)
        assert backend.suspend(1).packing_ratio < 0.75
        assert backend.resume().packing_ratio < 0.75
        assert filled.is_as_written()
        backend.trim()
