"""What torch allocates in a region carries its tag, sleeps, and wakes where it was."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.errors import RequestError
from sleepbackends.mechanism import POISON_BYTE, Fill
from sleepbackends.residency import Residency
from sleepbackends.settings import BackendSettings

from .helpers import LARGE, MIB, SLACK, blocks, free_device_bytes, holds, pattern, spin, tag_of

SIZES = [4, 4000, MIB, MIB + 4, 3 * MIB + 4, 20 * MIB, 40 * MIB + 12]


def cycle(backend: CumemBackend) -> None:
    assert backend.suspend(1).changed
    assert backend.resume().changed


def test_contents_and_addresses_survive(backend: CumemBackend, heavy_bytes: int) -> None:
    sizes = [*SIZES, heavy_bytes]
    with backend.region("weights"):
        tensors = [pattern(size, seed) for seed, size in enumerate(sizes)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for number in range(3):
        awake_free = free_device_bytes()
        report = backend.suspend(1)
        # Nothing changes after the first, so its copy is still good.
        assert report.copied_bytes >= sum(sizes) if number == 0 else report.copied_bytes == 0
        assert backend.state().mapped_bytes == 0
        assert free_device_bytes() - awake_free > sum(sizes) - SLACK
        backend.resume()
        assert backend.state().asleep_bytes == 0
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        assert all(holds(tensor, seed) for seed, tensor in enumerate(tensors))


def test_what_kernels_wrote_just_before_is_saved(backend: CumemBackend) -> None:
    with backend.region("weights"):
        tensor = pattern(LARGE, 1)
    spin(300_000_000)
    tensor.copy_(pattern(LARGE, 2))
    cycle(backend)
    assert holds(tensor, 2)


def test_views_stay_views(backend: CumemBackend) -> None:
    with backend.region("weights"):
        base = pattern(LARGE, 3)
    part, as_bytes, turned = base[1000:2000], base.view(torch.uint8), base.view(1024, -1).t()
    cycle(backend)
    base[1500] = 77
    assert part[500] == 77
    assert as_bytes[6000:6004].tolist() == [77, 0, 0, 0]
    turned[0, 1] = 88
    assert base[turned.shape[0]] == 88


@pytest.mark.parametrize("fill", [Fill.ZERO, Fill.POISON])
def test_discarded_tensors_come_back_filled(fill: Fill) -> None:
    backend = CumemBackend(settings=BackendSettings(fill=fill))
    with backend.region("kv_cache"):
        tensors = [pattern(size, seed) for seed, size in enumerate(SIZES)]
    backend.discard(["kv_cache"])
    assert backend.resume().undefined_tags == {"kv_cache"}
    byte = POISON_BYTE if fill is Fill.POISON else 0
    assert all((tensor.view(torch.uint8) == byte).all() for tensor in tensors)
    backend.close()


def test_regions_nest_and_the_innermost_counts(backend: CumemBackend) -> None:
    with backend.region("weights"):
        first = pattern(LARGE, 1)
        with backend.region("kv_cache"):
            inner = pattern(LARGE, 2)
            with backend.region("weights"):
                innermost = pattern(1000, 3)
            inner_again = pattern(1000, 4)
        last = pattern(LARGE, 5)
    outside = pattern(LARGE, 6)
    tags = [tag_of(backend, t) for t in (first, inner, innermost, inner_again, last, outside)]
    assert tags == ["weights", "kv_cache", "weights", "kv_cache", "weights", None]
    backend.suspend(1)
    assert holds(outside, 6)
    backend.resume(["weights"])
    assert all(holds(t, seed) for t, seed in ((first, 1), (innermost, 3), (last, 5)))
    assert backend.state().asleep_tags() == {"kv_cache"}


def test_an_error_inside_a_region_ends_it(backend: CumemBackend) -> None:
    with pytest.raises(ZeroDivisionError), backend.region("weights"), backend.region("kv_cache"):
        _ = 1 / 0
    outside = pattern(LARGE, 1)
    assert tag_of(backend, outside) is None
    with backend.region("weights"):
        inside = pattern(LARGE, 2)
    assert tag_of(backend, inside) == "weights"


def test_a_bad_tag_is_refused_before_anything_happens(backend: CumemBackend) -> None:
    with pytest.raises(RequestError, match="cannot be a tag"), backend.region("two words"):
        pass
    assert not backend.state().tags
    assert tag_of(backend, pattern(LARGE, 1)) is None


def test_a_region_belongs_to_the_thread_that_opened_it(backend: CumemBackend) -> None:
    threads, rounds = 4, 5
    together = threading.Barrier(threads + 1, timeout=60)

    def work(number: int) -> list[torch.Tensor]:
        found = []
        for _ in range(rounds):
            together.wait()
            with backend.region(f"tag{number}"):
                found += [pattern(size, number) for size in SIZES]
        return found

    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(work, number) for number in range(threads)]
        outside = []
        for _ in range(rounds):
            together.wait()
            outside += [pattern(size, 9) for size in SIZES]
        tensors = [result.result(60) for result in running]
    for number, found in enumerate(tensors):
        assert {tag_of(backend, tensor) for tensor in found} == {f"tag{number}"}
    assert {tag_of(backend, tensor) for tensor in outside} == {None}
    backend.suspend(1)
    assert all(holds(tensor, 9) for tensor in outside)
    backend.resume()
    assert all(holds(tensor, n) for n, found in enumerate(tensors) for tensor in found)


def test_small_tensors_share_blocks(backend: CumemBackend) -> None:
    with backend.region("weights"):
        small = [pattern(8000, seed) for seed in range(200)]
    assert blocks(backend, "weights") == 1
    with backend.region("weights"):
        medium = [pattern(MIB, seed) for seed in range(512)]
    # Torch asks for 256 segments of 2 MiB.
    assert blocks(backend, "weights") < 40
    cycle(backend)
    assert all(holds(tensor, seed) for seed, tensor in enumerate(small))
    assert all(holds(tensor, seed) for seed, tensor in enumerate(medium))


def test_memory_freed_in_a_region_is_used_again(backend: CumemBackend) -> None:
    kept, addresses = [], set()
    with backend.region("weights"):
        for seed in range(20):
            temporary = pattern(LARGE, seed)
            addresses.add(temporary.data_ptr())
            kept.append(temporary[:1000].clone())
            del temporary
    assert len(addresses) == 1
    assert backend.state().tags["weights"].total_bytes < LARGE
    cycle(backend)
    assert all(torch.equal(t, pattern(4000, seed)) for seed, t in enumerate(kept))


def test_out_of_memory_is_torch_s_own_error(backend: CumemBackend) -> None:
    too_much = torch.cuda.mem_get_info()[1] * 2
    with backend.region("weights"):
        before = pattern(LARGE, 1)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(too_much, dtype=torch.uint8, device="cuda")
        after = pattern(LARGE, 2)
    with backend.region("weights"):
        later = pattern(LARGE, 3)
    assert blocks(backend, "weights") == 3
    cycle(backend)
    assert all(holds(t, seed) for t, seed in ((before, 1), (after, 2), (later, 3)))


def test_two_backends_do_not_meet(backend: CumemBackend) -> None:
    other = CumemBackend()
    with backend.region("weights"):
        ours = pattern(LARGE, 1)
        with other.region("weights"):
            theirs = pattern(LARGE, 2)
        small = pattern(1000, 3)
    with other.region("weights"):
        theirs_small = pattern(1000, 4)
    assert [tag_of(backend, t) for t in (ours, theirs, small, theirs_small)] == [
        "weights",
        None,
        "weights",
        None,
    ]
    state = other.state()
    backend.suspend(1)
    assert other.state() == state
    assert holds(theirs, 2)
    assert holds(theirs_small, 4)
    other.suspend(1)
    backend.resume()
    assert holds(ours, 1)
    assert holds(small, 3)
    assert other.state().asleep_tags() == {"weights"}
    other.close()


def test_closing_drops_saved_bytes_and_leaves_awake_memory_alone(backend: CumemBackend) -> None:
    other = CumemBackend()
    with other.region("weights"):
        awake = pattern(LARGE, 1)
    with backend.region("weights"):
        asleep = pattern(LARGE, 2)
    backend.suspend(1)
    other.close()
    backend.close()
    assert holds(awake, 1)
    assert backend.state().tags["weights"].residencies == {Residency.DISCARDED}
    del asleep


def test_is_managed_tells_whose_memory_it_is(backend: CumemBackend) -> None:
    with backend.region("weights"):
        inside = pattern(LARGE, 1)
        raw = torch.empty(8, device="cuda")
    outside = pattern(LARGE, 2)
    assert backend.is_managed(inside.data_ptr())
    assert backend.is_managed(inside[-1:].data_ptr())
    assert backend.is_managed(raw.data_ptr())
    assert not backend.is_managed(outside.data_ptr())
    address = inside.data_ptr()
    backend.suspend(1)
    assert backend.is_managed(address)
    backend.resume()
    del inside
    torch.cuda.empty_cache()
    assert not backend.is_managed(address)
