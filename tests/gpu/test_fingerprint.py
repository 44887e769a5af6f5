"""Fingerprints of real device memory: the same as the host's, of every change, at full speed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.cumem.fingerprint import CudaFingerprints
from sleepbackends.cumem.torch_fingerprint import TorchFingerprints
from sleepbackends.vmm.fingerprint import Pending, Span, host_fingerprint

from .helpers import GIB, MIB, free_device_bytes, pattern

SPAN_BYTES = 32 * MIB
GROUP = 32
CHANGES = 10_000

Property = Callable[[str, object], None]


@pytest.fixture
def driver() -> Iterator[CudaDriver]:
    driver = CudaDriver()
    assert driver.fingerprints.prepare(0, 1024), "there is neither NVRTC nor a kept kernel"
    yield driver
    driver.close()


def random_bytes(size_bytes: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    shape, options = (size_bytes // 8,), {"dtype": torch.int64, "device": "cuda"}
    words = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator, **options)  # type: ignore[call-overload]
    found: torch.Tensor = words.view(torch.uint8)
    torch.cuda.synchronize()
    return found


def queued(pending: Pending | None) -> Pending:
    assert pending is not None
    return pending


def spans_of(tensor: torch.Tensor, span_bytes: int = SPAN_BYTES) -> list[Span]:
    return [
        Span(tensor.data_ptr() + at, min(span_bytes, tensor.nbytes - at))
        for at in range(0, tensor.nbytes, span_bytes)
    ]


def random_cuts(size_bytes: int, count: int, source: random.Random) -> list[tuple[int, int]]:
    """Offsets and sizes: mostly as blocks have them, some at any byte."""
    cuts = [(0, 0), (0, size_bytes), (1, size_bytes - 1), (16, 16), (size_bytes - 3, 3)]
    for number in range(count):
        size = source.randrange(2 ** source.randrange(1, 26))
        offset = source.randrange(size_bytes - size)
        cuts.append((offset // 512 * 512, size) if number % 3 else (offset, size))
    return cuts


def test_it_is_what_the_host_computes(driver: CudaDriver) -> None:
    tensor = random_bytes(64 * MIB)
    on_host = tensor.cpu()
    cuts = random_cuts(tensor.nbytes, 400, random.Random(1))  # noqa: S311 - test data
    spans = [Span(tensor.data_ptr() + offset, size) for offset, size in cuts]
    found = queued(driver.fingerprint(0, spans)).result()
    expected = [host_fingerprint(on_host.data_ptr() + offset, size) for offset, size in cuts]
    assert found == expected
    assert torch.equal(tensor.cpu(), on_host), "it is only read"


def test_torch_computes_the_same(driver: CudaDriver) -> None:
    tensor = random_bytes(64 * MIB)
    cuts = random_cuts(tensor.nbytes, 20, random.Random(2))  # noqa: S311 - test data
    spans = [Span(tensor.data_ptr() + offset, size) for offset, size in cuts]
    way = TorchFingerprints(0)
    found = [queued(way.queue(part)) for part in (spans[:3], spans[3:])]
    expected = queued(driver.fingerprint(0, spans)).result()
    assert [each for pending in found for each in pending.result()] == expected


Change = list[tuple[int, bytes]]
"""Where to write what."""


def random_change(known: bytearray, source: random.Random) -> Change:
    """A bit, a few bytes, the sign of numbers, two words that change places, a byte that moves."""
    at = source.randrange(len(known) - 64)
    kind = source.randrange(5)
    if kind == 0:
        return [(at, bytes([known[at] ^ 1 << source.randrange(8)]))]
    if kind == 1:
        return [(at, source.randbytes(source.randrange(1, 17)))]
    words = sorted({at // 8 * 8, source.randrange(len(known) // 8) * 8})
    if kind == 2:
        return [(word + 7, bytes([known[word + 7] ^ 0x80])) for word in words]
    if kind == 3:
        contents = [bytes(known[word : word + 8]) for word in words]
        return list(zip(words, reversed(contents), strict=True))
    return [(at, bytes(known[at + 1 : at + 33] + known[at : at + 1]))]


def test_every_small_change_is_seen(driver: CudaDriver, record_property: Property) -> None:
    """Ten thousand changes of 256 MiB, each of them made, looked for and taken back."""
    tensor, source = random_bytes(256 * MIB), random.Random(3)  # noqa: S311 - test data
    known, spans = bytearray(tensor.cpu().numpy().tobytes()), spans_of(tensor)
    before = queued(driver.fingerprint(0, spans)).result()
    made = missed = elsewhere = 0
    while made < CHANGES:
        change = random_change(known, source)
        ends = [end for at, new in change for end in (at, at + len(new) - 1)]
        undo = [(at, bytes(known[at : at + len(new)])) for at, new in change]
        if change == undo:
            continue
        for at, new in change:
            driver.write(tensor.data_ptr() + at, new, 0)
        after = queued(driver.fingerprint(0, spans)).result()
        changed = {number for number, each in enumerate(after) if each != before[number]}
        made += 1
        missed += not changed
        elsewhere += bool(changed - {end // SPAN_BYTES for end in ends})
        for at, old in undo:
            driver.write(tensor.data_ptr() + at, old, 0)
    record_property("changes", made)
    record_property("changes_missed", missed)
    assert (made, missed, elsewhere) == (CHANGES, 0, 0)
    assert queued(driver.fingerprint(0, spans)).result() == before
    assert tensor.cpu().numpy().tobytes() == known


def test_it_runs_beside_copies(driver: CudaDriver, record_property: Property) -> None:
    """And how long it takes then: the sums come back over the link that the copies fill."""
    tensor = pattern(GIB, 1)
    on_host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    expected = queued(driver.fingerprint(0, spans_of(tensor))).result()
    lane = driver.lane(0, "copy")
    for _ in range(8):
        lane.to_host(on_host.data_ptr(), tensor.data_ptr(), GIB)
    copied = lane.event()
    started = time.perf_counter()
    assert queued(driver.fingerprint(0, spans_of(tensor))).result() == expected
    record_property("gib_beside_copies_ms", round((time.perf_counter() - started) * 1e3, 3))
    record_property("was_done_before_the_copies", not copied.done())
    copied.wait()
    assert torch.equal(on_host.view(torch.int32), tensor.cpu())


def seconds(fingerprints: CudaFingerprints, groups: Sequence[Sequence[Span]]) -> float:
    started = time.perf_counter()
    pending = [queued(fingerprints.queue(0, group)) for group in groups]
    for each in pending:
        each.result()
    return time.perf_counter() - started


def test_speed(driver: CudaDriver, record_property: Property) -> None:
    """As a suspend asks: groups of 32 spans of 32 MiB, all queued before the first is read."""
    size_bytes = min(16 * GIB, free_device_bytes() // 2) // SPAN_BYTES * SPAN_BYTES
    tensor = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    spans = spans_of(tensor)
    groups = [spans[at : at + GROUP] for at in range(0, len(spans), GROUP)]
    seconds(driver.fingerprints, groups)
    best_s = min(seconds(driver.fingerprints, groups) for _ in range(5))
    one_s = min(seconds(driver.fingerprints, groups[:1]) for _ in range(5))
    record_property("fingerprint_gb_per_s", round(size_bytes / best_s / 1e9, 1))
    record_property("fingerprint_size_gib", round(size_bytes / GIB, 1))
    record_property("first_gib_ms", round(one_s * 1e3, 3))
    # Ten times what a link to the host carries: else copying everything would be as good.
    assert size_bytes / best_s > 500e9
