"""Ranks in Ray actors, with the host backend.

One small Ray on this machine and two actors serve all tests; the last test kills the actors.
Every test makes a group of its own, which goes on where the one before it stopped.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling.cases import CASES
from benchmarks.scaling.spec import Spec
from sleepbackends import Control, Orchestrator, RankLostError, RequestError, TransitionTimeoutError
from sleepbackends.ranks import RayGroup
from sleepbackends.testing import FakeEngine
from tests.bench.scaling import check_rows, measured
from tests.ranks.parts import SIZE, alike, check_fault, each_fault

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'sleepbackends[ray]'")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ray_engine.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="CRITICAL",
        )
        yield
        with warnings.catch_warnings():
            # Ray kills its processes and does not wait for them, which their owners tell of.
            warnings.simplefilter("ignore", ResourceWarning)
            ray.shutdown()
            gc.collect()


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    from tests.ranks.ray_worker import Worker

    actor = ray.remote(num_cpus=0, concurrency_groups={"sleepbackends": 4})(Worker)
    return [actor.remote(number) for number in range(2)]


def grouped(workers: list[Any], grace_s: float = 10.0) -> RayGroup:
    return RayGroup(workers, timeout_s=30.0, grace_s=grace_s)


def test_actors_sleep_release_and_wake_as_one(workers: list[Any]) -> None:
    engine = FakeEngine()
    orchestrator = Orchestrator(grouped(workers), hooks=engine.hooks())
    report = orchestrator.sleep()
    assert report.released_bytes == 12 * SIZE
    assert report.steps[0].ranks.keys() == {0, 1}
    assert orchestrator.wake_up().serving
    assert orchestrator.release_kv_cache().released_bytes == 4 * SIZE
    assert orchestrator.state().sleep_state.value == "kv_cache_released"
    assert orchestrator.wake_up().serving
    assert all(ray.get([worker.holds.remote() for worker in workers]))
    assert engine.named() == ["quiesce", "drop_caches", "unquiesce"] * 2


def test_a_fault_on_one_actor_at_every_step(workers: list[Any]) -> None:
    group = grouped(workers)
    for verb, step, call in each_fault():
        check_fault(
            group, verb, step, call, lambda faults: int(ray.get(workers[1].break_at.remote(faults)))
        )
    assert all(ray.get([worker.holds.remote() for worker in workers]))


def test_an_actor_that_hangs_is_named_and_goes_on_harmlessly(workers: list[Any]) -> None:
    group = grouped(workers, grace_s=0.3)
    ray.get(workers[1].hang_on_save.remote())
    with pytest.raises(TransitionTimeoutError, match="rank 1 did not say how it ended"):
        group.suspend(1, control=Control(timeout_s=2.0))
    assert not group.state().ranks[0].asleep_tags()
    ray.get(workers[1].go_on.remote())
    for _ in range(100):
        try:
            group.suspend(1)
            break
        except (RequestError, TransitionTimeoutError):
            time.sleep(0.05)
    assert alike(group.state())
    assert group.state().mapped_bytes == 0
    group.resume()
    group.mark_valid(["kv_cache"])
    assert not group.state().unusable_tags()


def test_an_actor_without_the_method_is_refused(workers: list[Any]) -> None:
    with pytest.raises(RequestError, match="rank 0 has no method 'no_such'"):
        RayGroup(workers, method="no_such")


def test_the_example_runs(cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert runpy.run_path(str(EXAMPLE))["main"]() == 0
    said = capsys.readouterr().out.splitlines()
    assert {"rank 0 gave back 48 MiB", "rank 1 gave back 48 MiB", "right"} <= set(said)


def test_the_benchmark_of_many_gpus_runs_in_actors(cluster: None) -> None:
    spec = Spec("ray", "host", 2, 0.002, 0.001, 0.5, rounds=2)
    rows, found = measured(spec)
    check_rows(rows, spec, CASES.keys() - {"staged"})
    assert len({rank["pid"] for rank in found} | {os.getpid()}) == 3


def test_an_actor_that_is_killed_is_named_and_the_other_is_usable(workers: list[Any]) -> None:
    group = grouped(workers)
    orchestrator = Orchestrator(group)
    ray.get(workers[1].die_on_save.remote())
    started = time.monotonic()
    with pytest.raises(RankLostError, match="rank 1 has gone: ActorDiedError") as caught:
        orchestrator.sleep(timeout_s=20)
    assert time.monotonic() - started < 20
    assert caught.value.ranks == (1,)
    assert set(caught.value.report.ranks) == {0}
    assert not caught.value.report.changed
    assert orchestrator.state().serving
    with pytest.raises(RankLostError):
        orchestrator.sleep()
    assert group.forget_lost() == (1,)
    assert orchestrator.sleep().released_bytes == 6 * SIZE
    assert orchestrator.wake_up().serving
    assert ray.get(workers[0].holds.remote())
    os.kill(ray.get(workers[0].pid.remote()), signal.SIGKILL)
    with pytest.raises(RankLostError, match="rank 0 has gone"):
        orchestrator.sleep()
    with pytest.raises(RequestError, match="no rank would be left"):
        group.forget_lost()
