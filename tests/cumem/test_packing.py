"""Packing of device memory by the kernels, through the simulated driver."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from sleepbackends.cumem import packing as module
from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.errors import ClosedError, DeviceMemoryError, MechanismError, RequestError
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.packing.layout import HEADER_BYTES, MOST_BYTES, Header, Layout
from tests.cumem.hashed import usage
from tests.cumem.packed import Device, device, driver, escapes, packed, triple
from tests.native.fixtures import DEVICES, GRANULE_BYTES
from tests.packing import CONTENTS, contents, reference_survey
from tests.simulators.cuda import Simulator

__all__ = ["device", "driver"]

LAYOUTS = [Layout(2, 3, 118), Layout(4, 3, 118), Layout(2, 7, 200), Layout(4, 1, 0)]
SIZES = [0, 1, 2, 5, 4096, 8191, 8193, 16_384, 100_003]


@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_there_and_back(device: Device, layout: Layout, size_bytes: int) -> None:
    data = contents("mixed", size_bytes, size_bytes)
    expected = packed(data, layout)
    assert device.pack(data, layout, len(expected)) == expected
    assert device.pack(data, layout, len(expected) + 160) == expected + b"\xee" * 160
    assert device.unpack(expected, size_bytes) == data
    assert device.unpack(expected + b"behind", size_bytes) == data


@pytest.mark.parametrize("number", range(DEVICES))
def test_many_are_surveyed_and_counted_at_once(driver: CudaDriver, number: int) -> None:
    device = Device(driver, number)
    datas = [contents(name, 20_000 + seed, seed) for seed, name in enumerate(CONTENTS)]
    spans = [device.put(data, 20_480 * place) for place, data in enumerate(datas)]
    surveyed = device.packing.survey(spans)
    layouts = [LAYOUTS[place % len(LAYOUTS)] for place in range(len(datas))]
    counted = device.packing.count(spans, layouts)
    assert counted.result() == [
        escapes(data, layout) for data, layout in zip(datas, layouts, strict=True)
    ]
    for choice, data in zip(surveyed.result(), datas, strict=True):
        found = None if choice is None else (triple(choice.layout), choice.escapes)
        assert found == reference_survey(data)
    assert surveyed.result() is surveyed.result(), "asked again"
    device.slots.close()


def test_nothing_to_look_at(simulator: Simulator, driver: CudaDriver) -> None:
    packing = driver.packing(0)
    assert packing is not None
    assert packing.survey([]).result() == []
    assert packing.count([], []).result() == []
    assert simulator.calls("cuLaunchKernel") == 0


def test_the_largest_span_says_how_many_blocks_count(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    layout, data = LAYOUTS[0], contents("weights", 5001, 1)
    spans = [device.put(data), Span(device.address, 16)]
    expected = [escapes(data, layout), escapes(data[:16], layout)]
    assert device.packing.count(spans, [layout] * 2).result() == expected
    monkeypatch.setattr(module, "_MOST_BLOCKS", 7)
    assert device.packing.count(spans, [layout] * 2).result() == expected


def test_without_room_for_all_escapes_the_header_says_so(device: Device) -> None:
    data, layout = contents("all elements", 30_000, 1), Layout(2, 3, 100)
    whole = packed(data, layout)
    for capacity in (layout.packed_bytes(len(data), 0), len(whole) - 16, len(whole) - 1):
        found = device.pack(data, layout, capacity)
        header = Header.read(found)
        assert header is not None
        assert not header.is_whole
        assert header.packed_bytes == len(whole)
        assert device.unpack(found, len(data)) == b"\xdd" * len(data)


def test_memory_that_changes_meanwhile(
    simulator: Simulator, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two launches: nothing is written elsewhere, and it can be unpacked."""
    layout = Layout(2, 3, 118)
    before, after = contents("weights", 50_000, 1), contents("random", 50_000, 1)
    simulator.set_on_demand(True)
    room = len(packed(before, layout))
    span = device.put(before)
    device.driver.write(device.target, b"\xee" * (room + 64), 0)
    real, launched = device.lane.launch, list[Any]()

    def launch(*arguments: Any) -> None:
        if len(launched) == 2:
            device.lane.wait()
            ctypes.memmove(span.address, after, len(after))
        launched.append(arguments)
        real(*arguments)

    monkeypatch.setattr(device.lane, "launch", launch)
    device.packing.pack(device.lane, span, layout, device.target, room)
    found = device.read(device.target, room + 64)
    assert found[room:] == b"\xee" * 64
    header = Header.read(found)
    assert header is not None
    assert header.is_whole
    assert len(launched) == 3
    first = device.unpack(found[:room], len(before))
    assert first == device.unpack(found[:room], len(before))
    assert first != before


@pytest.mark.parametrize("damage", ["magic", "layout", "size", "escapes", "short"])
def test_bytes_that_cannot_be_unpacked_leave_the_span_as_it_is(device: Device, damage: str) -> None:
    data = contents("weights", 9000, 1)
    good = packed(data, Layout(2, 3, 118))
    at = {"magic": 0, "layout": 5, "size": 9, "escapes": 18, "short": 0}[damage]
    bad = good[:-16] if damage == "short" else good[:at] + b"\xff" + good[at + 1 :]
    assert device.unpack(bad, len(data)) == b"\xdd" * len(data)
    for size in (0, 8999, 9001):
        assert device.unpack(good, size) == b"\xdd" * size


def test_what_a_survey_cannot_pack_it_says_none_of(device: Device) -> None:
    span = device.put(contents("weights", 20_000, 1))
    wrong = [Span(span.address + 8, 9000), Span(span.address, MOST_BYTES + 1)]
    choices = device.packing.survey([*wrong, span, Span(span.address, 0)]).result()
    assert choices[:2] == [None, None]
    assert choices[2] is not None
    assert choices[3] is None


def test_what_is_refused_before_anything_is_queued(simulator: Simulator, device: Device) -> None:
    packing, layout, lane = device.packing, Layout(2, 3, 118), device.lane
    span, room = Span(device.address, 1000), layout.packed_bytes(1000, 500)
    launches = simulator.calls("cuLaunchKernel")
    for wrong in (Span(device.address + 4, 1000), Span(device.address, MOST_BYTES + 1)):
        for target in (device.target, device.target + 8):
            with pytest.raises(RequestError, match="cannot be packed"):
                packing.pack(lane, wrong, layout, target, 2 * MOST_BYTES)
        with pytest.raises(RequestError):
            packing.count([span, wrong], [layout] * 2)
        with pytest.raises(RequestError):
            packing.unpack(lane, span, wrong)
    with pytest.raises(RequestError):
        packing.pack(lane, span, layout, device.target + 8, room)
    with pytest.raises(RequestError, match="have room for 752 and each escape"):
        packing.pack(lane, span, layout, device.target, layout.packed_bytes(1000, 0) - 1)
    with pytest.raises(RequestError, match="cannot be packed"):
        packing.unpack(lane, Span(device.target + 8, room), span)
    with pytest.raises(RequestError, match="no packed ones"):
        packing.unpack(lane, Span(device.target, HEADER_BYTES - 1), span)
    other = device.driver.lane(1, "pack")
    with pytest.raises(RequestError, match="no lane of device 0"):
        packing.pack(other, span, layout, device.target, room)
    with pytest.raises(RequestError, match="no lane of device 0"):
        packing.unpack(other, Span(device.target, room), span)
    assert simulator.calls("cuLaunchKernel") == launches


def test_a_span_that_is_not_mapped_ends_the_context(simulator: Simulator) -> None:
    driver = CudaDriver()
    device = Device(driver)
    behind = Span(device.address, 3 * device.slots.size_bytes)
    device.packing.pack(device.lane, behind, Layout(2, 3, 118), device.target, 10**7)
    with pytest.raises(MechanismError, match=r"packing failed.*ILLEGAL_ADDRESS") as caught:
        device.lane.wait()
    assert not caught.value.recoverable
    assert simulator.violations() == {"queued_copy_faulted": 1}
    simulator.reset()


@pytest.mark.parametrize("packs", [True, False])
def test_memory_is_in_use_as_long_as_work_with_it_is_queued(
    simulator: Simulator, packs: bool
) -> None:
    device = Device(CudaDriver())
    other = device.packing.slots(1, 8192)
    simulator.set_on_demand(True)
    span = Span(other.addresses[0], 4096)
    if packs:
        device.packing.pack(device.lane, span, Layout(2, 3, 118), device.target, 4096)
    else:
        device.packing.unpack(device.lane, Span(device.target, 4096), span)
    other.close()
    assert simulator.violations() == {"unmap_in_use": 1}
    simulator.reset()


def test_lanes_wait_for_events_of_others(simulator: Simulator, device: Device) -> None:
    simulator.set_on_demand(True)
    layout, data = Layout(2, 3, 118), b"\x3c" * 4000
    device.put(bytes(4000))
    fill = device.driver.lane(0, "fill")
    fill.fill(device.address, 4000, 0x3C)
    device.lane.wait_for(fill.event())
    device.packing.pack(device.lane, Span(device.address, 4000), layout, device.target, 4800)
    device.lane.wait()
    expected = packed(data, layout)
    assert device.read(device.target, len(expected)) == expected


def test_only_events_of_the_driver_are_waited_for(device: Device) -> None:
    with pytest.raises(RequestError, match="no event of this driver"):
        device.lane.wait_for(threading.Event())  # type: ignore[arg-type]
    event = device.lane.event()
    device.driver.close()
    with pytest.raises(ClosedError):
        device.lane.wait_for(event)


class TestSlots:
    def test_they_are_apart_and_come_and_go_together(
        self, simulator: Simulator, driver: CudaDriver
    ) -> None:
        packing = driver.packing(1)
        assert packing is not None
        slots = packing.slots(3, GRANULE_BYTES // 2 + 1)
        first, second, third = slots.addresses
        assert second - first == third - second == slots.size_bytes == GRANULE_BYTES // 2 + 512
        assert [each.size_bytes for each in simulator.mappings()] == [2 * GRANULE_BYTES]
        for address in slots.addresses:
            driver.write(address, bytes(slots.size_bytes), 1)
        slots.close()
        slots.close()
        assert slots.addresses == []
        assert simulator.mappings() == []

    def test_there_is_not_enough(self, simulator: Simulator, driver: CudaDriver) -> None:
        packing = driver.packing(0)
        assert packing is not None
        reserved = simulator.process_usage().reserved_bytes
        simulator.set_budget_bytes(1 << 20)
        with pytest.raises(DeviceMemoryError) as caught:
            packing.slots(4, 1 << 20)
        assert caught.value.needed_bytes == 4 << 20
        assert simulator.process_usage().reserved_bytes == reserved
        packing.slots(1, 1 << 19).close()
        simulator.set_budget_bytes(None)


def test_it_is_the_same_until_the_driver_is_closed(
    simulator: Simulator, driver: CudaDriver
) -> None:
    packing = driver.packing(0)
    assert packing is driver.packing(0)
    assert packing is not driver.packing(1)
    assert simulator.process_usage().live_modules == 2
    driver.close()
    assert simulator.process_usage().live_modules == 0
    assert driver.packing(0) not in (packing, None)


def test_closing_ends_what_was_not_asked_for(device: Device) -> None:
    layout, data = LAYOUTS[0], contents("weights", 1000, 1)
    span = device.put(data)
    pending, read = device.packing.survey([span]), device.packing.count([span], [layout])
    assert read.result() == [escapes(data, layout)]
    device.driver.close()
    with pytest.raises(ClosedError, match="went with their driver"):
        pending.result()
    assert read.result() == [escapes(data, layout)]


def test_once_its_driver_is_closed_it_takes_nothing(simulator: Simulator, device: Device) -> None:
    layout, span = LAYOUTS[0], device.put(contents("weights", 1000, 1))
    device.driver.close()
    used = usage(simulator)
    with pytest.raises(ClosedError):
        device.packing.count([span], [layout])
    with pytest.raises(ClosedError):
        device.packing.survey([span])
    with pytest.raises(ClosedError):
        device.packing.unpack(device.lane, Span(device.target, 4096), span)
    assert usage(simulator) == used


def test_threads_share_it(device: Device) -> None:
    layout, data = LAYOUTS[0], contents("weights", 10_000, 1)
    span = device.put(data)
    errors: list[BaseException] = []

    def use(number: int) -> None:
        try:
            for _ in range(10):
                part = Span(span.address, 1000 * number)
                counted = device.packing.count([part], [layout]).result()
                assert counted == [escapes(data[: part.size_bytes], layout)]
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_the_source_is_part_of_the_package() -> None:
    source = module.kernel_source()
    assert source.text.count(b'extern "C" __global__') == len(module._KERNELS)
    assert [name for name, _ in source.headers] == ["packing.h", "carry.h"]
