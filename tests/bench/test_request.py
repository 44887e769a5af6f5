from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sleepbackends.bench.request import Request, Spec
from sleepbackends.bench.rows import IN_TURN, OURS, PEERS, PLAIN_COPY, STAGED
from sleepbackends.errors import RequestError

ALLOCATORS = [*((peer, "none") for peer in (*PEERS, OURS)), (OURS, "zero"), (STAGED, "none")]


def test_everything_in_order() -> None:
    specs = Request((4, 16), 8, (256, 1), rounds=3, peers=Path("peers")).specs()
    order = [(spec.peer, spec.weights_gib, spec.tensor_mib, spec.fill) for spec in specs]
    expected: list[Any] = [(IN_TURN, 0, 0, "none")]
    for weights in (4, 16):
        expected += [(PLAIN_COPY, weights, 0, "none"), (IN_TURN, weights, 0, "none")]
        expected += [(peer, weights, size, how) for size in (256, 1) for peer, how in ALLOCATORS]
    assert order == expected
    assert {spec.kv_gib for spec in specs if spec.peer not in (PLAIN_COPY, IN_TURN)} == {8}
    turns = [(spec.kv_gib, list(spec.among)) for spec in specs if spec.peer == IN_TURN]
    assert turns == [(8, [OURS, "tms"]), *[(0, [OURS, "vllm", "tms_retain"])] * 2]
    assert {spec.folder for spec in specs if spec.peer != PLAIN_COPY} == {"peers"}
    assert {spec.rounds for spec in specs} == {3}


def test_only_some() -> None:
    specs = Request((16.0,), tensor_mib=(20,), only=("vllm",)).specs()
    assert [spec.peer for spec in specs] == [PLAIN_COPY, "vllm"]
    assert specs[1].folder is None
    both = Request(tensor_mib=(20,), only=(OURS, "tms")).specs()
    assert [spec.peer for spec in both] == [IN_TURN, PLAIN_COPY, "tms", OURS, OURS, STAGED]


def test_two_devices() -> None:
    request = Request((4, 8), 32, (256, 1), devices=2)
    kinds = [(spec.peer, spec.weights_gib, spec.devices) for spec in request.specs()]
    assert kinds == [(PLAIN_COPY, 4, 2), (OURS, 4, 2), (PLAIN_COPY, 8, 2), (OURS, 8, 2)]
    assert request.device_gib == 8
    assert Request((4, 8), 32).device_gib == 40


def test_titles_are_different() -> None:
    for request in (Request((4, 16)), Request((4, 16), devices=2)):
        titles = [spec.title for spec in request.specs()]
        assert len(set(titles)) == len(titles)
    assert Spec(OURS, 16, 32, 20, fill="zero").title == (
        "sleepbackends, 16 GiB, tensors of 20 MiB, zero-filled"
    )


def test_what_is_given_twice_is_measured_once() -> None:
    once, twice = Request((16,), tensor_mib=(20,)), Request((16, 16), tensor_mib=(20, 20))
    assert once.specs() == twice.specs()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rounds": 1}, "--rounds must be 2 or more"),
        ({"devices": 3}, "3 devices cannot be compared"),
        ({"only": ("x", OURS)}, "nothing is known of x .known: sleepbackends, vllm"),
        ({"weights_gib": ()}, "no amount of weights"),
        ({"tensor_mib": ()}, "no tensor size"),
        ({"weights_gib": (16, 0)}, "0 GiB of weights cannot be tensors of 256 MiB"),
        ({"weights_gib": (0.125,)}, "0.125 GiB of weights cannot be tensors of 256 MiB"),
        ({"tensor_mib": (-1,)}, "must be positive"),
        ({"kv_gib": 0.5}, "--kv-gib must be 0, or 1 or more"),
        ({"kv_gib": -1.0}, "--kv-gib must be 0, or 1 or more"),
        ({"timeout_s": 0}, "time limit of 0 s"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Request(**wrong)


def test_turns_are_taken_by_those_that_are_asked_for() -> None:
    def turns(**asked: Any) -> list[tuple[str, ...]]:
        specs = Request(**asked).specs()
        return [tuple(spec.among) for spec in specs if spec.peer == IN_TURN]

    assert turns() == [(OURS, "tms"), (OURS, "vllm", "tms_retain")]
    assert turns(kv_gib=0.0) == [(OURS, "vllm", "tms_retain")]
    assert turns(only=(OURS, "vllm")) == [(OURS, "vllm")]
    assert turns(only=("vllm", "tms")) == turns(only=(OURS,)) == turns(devices=2) == []
