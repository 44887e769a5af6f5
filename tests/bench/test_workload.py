"""What of a measurement runs without a GPU: the order of the cases, and the checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.bench import workload
from sleepbackends.bench.peers import Allocator
from sleepbackends.bench.request import DESCRIBE, FIRST_TIME, Spec
from sleepbackends.bench.rows import IN_TURN, OURS, Row
from sleepbackends.bench.weights import Weights
from sleepbackends.errors import ContentsLostError
from tests.native.fixtures import kernel_images, native_library, simulator
from tests.simulators.cuda import Simulator

__all__ = ["kernel_images", "native_library", "simulator"]

torch = pytest.importorskip("torch")


class Keeping(Allocator):
    """Keeps weights on the side, except that it loses those of one sleep."""

    def __init__(self, weights: Weights, loses: int = -1) -> None:
        self._weights = weights
        self._saved: list[Any] = []
        self._sleeps_left = loses
        self.calls: list[str] = []
        self.slept: list[Any] = []
        """All weights together, as they were when they went."""

    def region(self, tag: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def suspend(self) -> None:
        self.calls.append("suspend")
        self._saved = [tensor.clone() for tensor in self._weights.tensors]
        self.slept.append(torch.cat(self._saved))
        for tensor in self._weights.tensors:
            tensor.zero_()

    def resume(self) -> None:
        self.calls.append("resume")
        if self._sleeps_left:
            for tensor, saved in zip(self._weights.tensors, self._saved, strict=True):
                tensor.copy_(saved)
        self._sleeps_left -= 1

    def discard_kv(self) -> None:
        self.calls.append("discard_kv")

    def resume_kv(self) -> None:
        self.calls.append("resume_kv")


def measure(peer: str, loses: int = -1) -> tuple[list[Row], Keeping]:
    weights = Weights(4096, "cpu")
    weights.allocate(3)
    weights.fill()
    allocator = Keeping(weights, loses)
    rows: list[Row] = []
    spec = Spec(peer, 1, 1, 1, rounds=2)

    def clock(call: Callable[[], object]) -> float:
        call()
        return float(len(allocator.calls))

    for number in range(spec.rounds):
        workload.measure_round(spec, number, allocator, weights, rows.append, clock)
    return rows, allocator


def test_a_peer_is_measured_dirty() -> None:
    rows, allocator = measure("vllm")
    cases = [row.case for row in rows if not row.case.endswith("_kv")]
    assert cases == ["suspend_first", "resume", "suspend_dirty", "resume"]
    assert allocator.calls[:4] == ["suspend", "resume", "discard_kv", "resume_kv"]
    assert len(rows) == len(allocator.calls) == 2 * (2 + 2 * workload.KV_TIMES)


def test_ours_is_measured_clean_and_almost_clean_too() -> None:
    rows, allocator = measure(OURS)
    cases = [row.case for row in rows if not row.case.endswith("_kv")]
    extra = ["suspend_clean", "suspend_1pct"]
    assert cases == ["suspend_first", "resume", *extra, "suspend_dirty", "resume", *extra]
    assert [row.seconds for row in rows[:4]] == [1, 2, 3, 5]
    assert allocator.calls[:6] == ["suspend", "resume"] * 3
    first, clean, almost, dirty = allocator.slept[:4]
    assert torch.equal(clean, first)
    # Of these three small tensors it is one.
    assert (almost != clean).sum() == 1024
    assert (dirty != almost).all()


@pytest.mark.parametrize("loses", range(6))
def test_lost_contents_end_the_measurement_whenever_they_are_lost(loses: int) -> None:
    with pytest.raises(ContentsLostError):
        measure(OURS, loses)


def take_turns(loses: int = -1) -> tuple[list[Row], dict[str, Keeping], list[str]]:
    weights = {peer: Weights(4096, "cpu") for peer in (OURS, "vllm")}
    peers = {peer: Keeping(of_peer) for peer, of_peer in weights.items()}
    peers["vllm"]._sleeps_left = loses
    rows: list[Row] = []
    awake: list[str] = []

    def clock(call: Callable[[], object]) -> float:
        call()
        up = [peer for peer, keeping in peers.items() if keeping.calls[-1] == "resume"]
        awake.append(" ".join(up))
        return 1.0

    spec = Spec(IN_TURN, 1, rounds=1, among=list(peers))
    workload.sleep_in_turn(spec, peers, weights, 2, rows.append, clock)
    return rows, peers, awake


def test_allocators_sleep_in_turn_with_all_others_asleep() -> None:
    rows, peers, awake = take_turns()
    assert awake[:4] == [OURS, "", "vllm", ""]
    assert awake[4:8] == ["vllm", "", OURS, ""]
    assert {keeping.calls[0] for keeping in peers.values()} == {"suspend"}
    for peer, keeping in peers.items():
        cases = [row.case for row in rows if row.peer == peer]
        assert cases == ["resume", "suspend_clean"] * workload.SLEEP_TIMES
        assert all(torch.equal(slept, keeping.slept[0]) for slept in keeping.slept)
    assert {(row.weights_gib, row.kv_gib, row.tensor_mib) for row in rows} == {(1, 0, 0)}


@pytest.mark.parametrize("loses", range(workload.SLEEP_TIMES))
def test_contents_that_a_peer_loses_in_its_turn_end_the_measurement(loses: int) -> None:
    with pytest.raises(ContentsLostError):
        take_turns(loses)


def test_the_process_writes_what_the_device_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows"
    monkeypatch.setattr(workload, "describe", lambda: {"gpu": "Made-up 9000"})
    workload.main([Spec(DESCRIBE).to_json(), str(rows)])
    assert json.loads(rows.read_text()) == {"gpu": "Made-up 9000"}


def test_the_process_writes_rows_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows"
    written: list[int] = []

    def measure_allocator(spec: Spec, emit: Callable[[Row], None]) -> None:
        for number in range(3):
            emit(spec.row("resume", number, 0.5))
            written.append(len(rows.read_text().splitlines()))

    monkeypatch.setattr(workload, "measure_allocator", measure_allocator)
    workload.main([Spec(OURS, 16, 32, 20).to_json(), str(rows)])
    assert written == [1, 2, 3]
    last = Row(**json.loads(rows.read_text().splitlines()[-1]))
    assert last == Row(OURS, "resume", 16, 32, 20, 2, 0.5)


def test_a_process_does_what_a_machine_does_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulator: Simulator
) -> None:
    done: list[int] = []

    def touch(size_bytes: int, _: object) -> None:
        done.append(size_bytes)

    monkeypatch.setattr(workload, "touch_host_memory", touch)
    workload.main([Spec(FIRST_TIME, 0.5, devices=2).to_json(), str(tmp_path / "rows")])
    assert done == [1 << 29]
