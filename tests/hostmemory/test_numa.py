"""NUMA nodes, as a made-up sysfs tells of them."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sleepbackends.hostmemory import numa
from tests.hostmemory.sysfs import sysfs


@pytest.fixture(autouse=True)
def four_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


def test_nodes_with_the_processors_that_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "SYSFS", sysfs(tmp_path, {0: "0-1,64", 1: "2,3-3,66-127"}))
    assert numa.nodes() == {0: {0, 1}, 1: {2, 3}}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 64})
    assert numa.nodes() == {0: {1, 64}}


def test_nodes_without_processors_or_without_memory_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "SYSFS", sysfs(tmp_path, {0: "0-3", 1: "", 9: "0"}, memory="0-1"))
    assert numa.nodes() == {0: {0, 1, 2, 3}}


@pytest.mark.parametrize("memory", [None, "", "many", "0-x"])
def test_a_kernel_that_tells_nothing_of_use(
    memory: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "SYSFS", sysfs(tmp_path, {0: "0-3"}, memory=memory))
    assert numa.nodes() == {}


@pytest.mark.parametrize(("said", "node"), [("1\n", 1), ("-1\n", None), ("", None), (None, None)])
def test_the_node_of_a_device(
    said: str | None, node: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = {} if said is None else {"0000:3b:00.0": said}
    monkeypatch.setattr(numa, "SYSFS", sysfs(tmp_path, {}, devices))
    assert numa.node_of("0000:3B:00.0") == node


def test_a_thread_runs_where_it_is_told_and_others_where_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    before = os.sched_getaffinity(0)
    chosen = {min(before)}

    def move() -> set[int]:
        assert numa.run_on(chosen)
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(move).result(10) == chosen
    assert os.sched_getaffinity(0) == os.sched_getaffinity(threading.get_native_id()) == before


def test_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    assert not numa.run_on({4095})
    assert os.sched_getaffinity(0) == before
