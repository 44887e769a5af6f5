"""The benchmark of many GPUs runs without any, and names what limits them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scale
from benchmarks.scaling import tables
from benchmarks.scaling.cases import CASES, PLAIN_ALONE, PLAIN_AT_ONCE
from benchmarks.scaling.host import bytes_by_node, copy_rates
from benchmarks.scaling.links import DEVICE_STEPS
from benchmarks.scaling.rank import RawWeights
from benchmarks.scaling.spec import GIB, LAYOUTS, MIB, ROOT, Row, Spec
from benchmarks.scaling.tables import Figures, limits
from sleepbackends.errors import ContentsLostError
from sleepbackends.host.backend import HostBackend
from sleepbackends.hostmemory.driver import round_up
from tests.bench.scaling import check_rows, measured
from tests.native.fixtures import GRANULE_BYTES, kernel_images, native_library, simulator
from tests.ranks.test_torch_distributed import needs_gloo
from tests.simulators.cuda import Simulator, build, environment

__all__ = ["kernel_images", "native_library", "simulator"]

SIZES = ["--weights-gib", "0.002", "--kv-gib", "0.001", "--tensor-mib", "0.5", "--rounds", "2"]


@needs_gloo
def test_two_ranks_on_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["processes", "threads", "single"]
    arguments = ["--backend", "host", "--ranks", "2", "--layout", *names, *SIZES]
    out = ["--coordination", "2", "--out", str(tmp_path / "out")]
    assert scale.main([*arguments, *out]) == 0
    text = (tmp_path / "out/scale.md").read_text()
    assert capsys.readouterr().out == text + "\n"
    result = json.loads((tmp_path / "out/scale.json").read_text())
    assert result["skipped"] == {}
    assert list(result["places"]) == [f"host, {layout}, 2" for layout in names]
    for layout in names:
        spec = Spec(layout, "host", 2, 0.002, 0.001, 0.5, rounds=2)
        rows = [Row(**row) for row in result["rows"] if row["layout"] == layout]
        check_rows(rows, spec, CASES.keys() - {"staged"})
        plain = {row.case for row in rows if row.case.startswith(("alone_", "at_once_"))}
        steps = ("touch", "copy_down", "copy_up")
        assert plain == {kind + step for kind in ("alone_", "at_once_") for step in steps}
        assert f"### host: {LAYOUTS[layout]}" in text
    assert "| host, processes | 2 | suspend: killed while it saves | all awake |" in text
    assert " NO |" not in text
    assert "### What limits it" in text
    assert "| 2 | suspend |" in text.partition("### Coordination")[2]


@pytest.mark.parametrize("layout", ["threads", "single"])
def test_two_simulated_gpus(
    layout: str, simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(build().parent, devices=2).items():
        monkeypatch.setenv(name, value)  # a backend is probed in a process of its own
    spec = Spec(layout, "cumem", 2, 0.002, 0.001, 0.5, plain_gib=0.001, rounds=2)
    rows, found = measured(spec)
    check_rows(rows, spec, set(CASES))
    clean = [row for row in rows if row.case in ("clean", "staged")]
    assert {row.copied_bytes for row in clean} == {0}
    assert {row.case for row in rows} >= {
        kind + step for kind in (PLAIN_ALONE, PLAIN_AT_ONCE) for step in DEVICE_STEPS
    }
    assert [rank["gpu"] for rank in found] == ["0000:10:00.0", "0000:11:00.0"]
    nodes = found[0]["arena_gib"]
    assert sum(nodes.values()) >= spec.weights_bytes / GIB
    usage = simulator.process_usage()
    assert (usage.pinned_bytes, usage.live_streams) == (0, 0)
    kv_bytes = round_up(int(spec.kv_gib * GIB), GRANULE_BYTES)
    assert simulator.device_usage().used_bytes == spec.weights_bytes + kv_bytes, "and no more"


def test_weights_that_changed_are_noticed() -> None:
    backend = HostBackend()
    with backend.region("weights") as region:
        weights = RawWeights(region, 2, 100, rank=1)
    weights.check()
    weights.change(7)
    weights.check()
    weights._memory[1][99] ^= 1
    with pytest.raises(ContentsLostError, match="weight 1 of rank 1"):
        weights.check()
    backend.close()


def test_a_process_that_fails_or_hangs_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    spec = Spec("threads", "no_such_backend", 2)
    assert "exit code 1: " in (problem := scale.run(spec, 60, lambda _: None))
    assert "no_such_backend" in problem
    assert "Traceback" in capsys.readouterr().err
    assert scale.run(spec, 0.01, lambda _: None) == "not done after 0.01 s"


def test_without_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sleepbackends.cumem.driver.bindings_problem", lambda: Problem())
    assert scale.main([]) == 2
    assert "nothing can be measured here: no bindings" in capsys.readouterr().err


class Problem:
    reason, hint = "no bindings", "install them"


@pytest.mark.parametrize(
    "wrong",
    [
        ["--ranks", "0"],
        ["--total-s", "0"],
        ["--weights-gib", "0"],
        ["--kv-gib", "-1"],
        ["--layout", "rows"],
    ],
)
def test_wrong_arguments(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        scale.main(wrong)
    assert caught.value.code == 2


def test_what_is_measured_by_default() -> None:
    specs = scale.specs(scale.parse([]), present=4)
    assert {spec.ranks for spec in specs} == {1, 2, 4}
    found = {(spec.backend, spec.layout) for spec in specs}
    assert found == {(b, n) for b in ("cumem", "cumem+checkpoint") for n in LAYOUTS} - {
        ("cumem+checkpoint", "threads")
    }
    assert (specs[0].weights_gib, specs[0].kv_gib, specs[0].weights_bytes) == (16, 32, 16 * GIB)


# What is made of the rows


def row(case: str, seconds: float, gib: float = 16.0, **more: Any) -> Row:
    return Row("processes", "cumem", 8, case, 0, seconds, size_bytes=int(gib * GIB), **more)


def rows(
    at_once_s: float, register_s: float = 0.1, reached_s: float = 0.66, map_s: float = 0.01
) -> list[Row]:
    """Eight links of 50 GiB/s each, and as many seconds as said for all at once."""
    alone = [0.32] * 8
    plain = [
        row(kind + step, seconds, rank_seconds=alone)
        for step in ("copy_down", "copy_up")
        for kind, seconds in (("alone_", 0.32), ("at_once_", at_once_s))
    ]
    ready = [
        row(f"{kind}{step}", seconds, gib=4.0, rank_seconds=[seconds] * 8)
        for kind in ("alone_", "at_once_")
        for step, seconds in (
            ("touch", 0.1),
            ("register", register_s),
            ("map", map_s),
            ("unmap", 0.01),
        )
    ]
    return [*plain, *ready, *(row(case, reached_s) for case in ("first", "dirty", "resume"))]


@pytest.mark.parametrize(
    ("found", "host_gib_s", "case", "name", "gib_s"),
    [
        (rows(0.32), 400, "dirty", "the links", 400),
        (rows(0.64), 400, "dirty", "the links, used at once", 200),
        (rows(0.64), 400, "resume", "the links, used at once", 200),
        (rows(0.64, register_s=0.32), 400, "first", "its registration by the driver", 100),
        (rows(0.64), 400, "first", "the links, used at once", 200),
        (rows(0.64, map_s=0.32), 400, "resume", "mapping by the driver", 100),
        (rows(0.64, map_s=0.32), 400, "dirty", "the links, used at once", 200),
        (rows(0.64), 110, "dirty", "the links, used at once", 200),
        (rows(0.64), 90, "dirty", "the links, used at once", 200),
    ],
)
def test_what_is_scarce_is_named(
    found: list[Row], host_gib_s: float, case: str, name: str, gib_s: float
) -> None:
    (wanted,) = [each for each in found if each.case == case]
    needs = limits(Figures(found), wanted, {"node 0": host_gib_s / 2, "all": host_gib_s})
    assert needs[0].name == name
    assert needs[0].gib_s == pytest.approx(gib_s)
    # Devices that copy faster than processors do are not limited by what these can.
    named = {need.name for need in needs}
    assert ("host memory, as processors use it" in named) == (2 * host_gib_s > 200)


def result(found: Sequence[Row], **more: Any) -> dict[str, Any]:
    return {
        "machine": {"gpus": 8},
        "host_copy_gib_s": {"node 0": 150.0, "node 1": 151.0, "all": 290.0},
        "timeout_s": 60.0,
        "rows": [dataclasses.asdict(each) for each in found],
        "places": {},
        "skipped": {},
        "coordination": {},
        **more,
    }


def test_the_tables() -> None:
    rank = {"rank": 5, "pid": 1, "gpu": "0000:3B:00.0", "gpu_node": 1}
    places = {"cumem, processes, 8": [{**rank, "arena_gib": {"node 1": 16.0}}]}
    fault = row("suspend: save", 0.5, outcome="all awake")
    one = dataclasses.replace(row("dirty", 0.34), ranks=1)
    lines = tables.markdown(result([*rows(0.64), one, fault], places=places)).splitlines()
    for line in (
        "| plain copies down | 8 | 400.0 | 200.0 | 50% |",
        "| first touch | 8 | 320.0 | 320.0 | 100% |",
        "| suspend, every byte of the weights changed | 1 | 0.340 |  | 47.1 | 1.00 |  |",
        "| suspend, every byte of the weights changed | 8 | 0.660 |  | 193.9 | 4.12 | 48% |",
        "| cumem, processes | dirty | 8 | 193.9 | the links, used at once | 200.0 | 97% |",
        "| cumem, processes | 8 | suspend: save | all awake | 0.500 | yes |",
        "| cumem, processes, 8 | 5 | 0000:3B:00.0 | 1 | node 1: 16.00 GiB |",
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("fault", "skipped", "failed"),
    [
        (row("suspend: save", 1.0, outcome="all awake"), {}, False),
        (row("resume: map", 1.0, outcome="all asleep"), {}, False),
        (row("suspend: save", 1.0, outcome="DIFFERENT"), {}, True),
        (row("suspend: save", 1.0, outcome="all asleep"), {}, True),
        (row("resume: map", 61.0, outcome="all asleep"), {}, True),
        (row("resume: map", 1.0, outcome="all asleep"), {"cumem, ray, 8": "no ray"}, True),
    ],
)
def test_a_run_that_failed(fault: Row, skipped: Mapping[str, str], failed: bool) -> None:
    found = result([*rows(0.32), fault], skipped=skipped)
    assert tables.has_failed(found) == failed
    text = tables.markdown(found)
    assert ("| NO |" in text) == (failed and not skipped)
    assert ("- cumem, ray, 8: no ray" in text) == bool(skipped)


# The host


def test_bytes_are_counted_by_node(tmp_path: Path) -> None:
    (tmp_path / "maps").write_text(
        "10000000-20000000 rw-p 00000000 00:00 0\n"
        "20000000-20200000 rw-p 00000000 00:00 0 \n"
        "30000000-30001000 rw-p 00000000 00:00 0 [heap]\n"
    )
    (tmp_path / "numa_maps").write_text(
        "10000000 default anon=9 dirty=9 N0=3 N1=6 kernelpagesize_kB=4\n"
        "20000000 bind:1 anon=1 N1=1 kernelpagesize_kB=2048\n"
        "30000000 default heap anon=1 N0=1 kernelpagesize_kB=4\n"
    )
    inside = [(0x18000000, 4096), (0x20000000, 100)]
    assert bytes_by_node(inside, tmp_path) == {0: 3 * 4096, 1: 6 * 4096 + 2 * MIB}
    assert bytes_by_node([(0x20200000, 4096)], tmp_path) == {}
    assert bytes_by_node(inside, tmp_path / "nothing") == {}


def test_host_memory_is_copied_by_every_node() -> None:
    rates = copy_rates(piece_bytes=10_000, times=2)
    assert rates
    assert all(rate > 0 for rate in rates.values())


def test_the_page_names_what_the_script_names() -> None:
    text = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    for layout in LAYOUTS:
        assert f"| `{layout}` | " in text
    found = rows(0.64)
    for transition in (each for each in found if each.case in tables.WHOLE):
        for need in limits(Figures(found), transition, {"all": 400.0}):
            assert f"| {need.name} | " in text
