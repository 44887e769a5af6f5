"""Kernels are there before the first suspend asks for them, and nobody pays for that twice."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from sleepbackends.cumem.images import Images
from sleepbackends.errors import MechanismError
from sleepbackends.vmm.warm_up import WarmUp
from tests.cumem.test_backend import Make, filled, holds, make
from tests.native.fixtures import GRANULE_BYTES
from tests.simulators.cuda import Simulator, build, environment
from tests.waiting import until

__all__ = ["make"]

BEGIN = WarmUp.begin
NAME = "sleepbackends-warm-up"
LARGE = 8 << 20
"""Enough to be packed."""


@pytest.fixture(autouse=True)
def on(simulator: Simulator, make: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(WarmUp, "begin", BEGIN)
    yield
    simulator.set_capturing(False)


def is_over() -> bool:
    return NAME not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(("packing", "modules"), [("auto", 2), ("off", 1)])
def test_a_suspend_finds_the_kernels_there(
    simulator: Simulator, make: Make, packing: str, modules: int
) -> None:
    backend = make(packing=packing)
    memory = filled(backend, "weights", LARGE, 1)
    until(is_over)
    assert simulator.calls("cuModuleLoadData") == modules
    backend.suspend(1)
    backend.resume()
    assert holds(memory, 1)
    assert simulator.calls("cuModuleLoadData") == modules


def test_each_device_has_them_once(simulator: Simulator, make: Make) -> None:
    backend = make(packing="off")
    for _ in range(3):
        filled(backend, "weights", GRANULE_BYTES, 1, 1)
    until(is_over)
    assert simulator.calls("cuModuleLoadData") == 1
    assert simulator.device_usage(0).context_references == 0, "nobody uses that device"
    backend.allocate("weights", GRANULE_BYTES, 0)
    until(is_over)
    assert simulator.calls("cuModuleLoadData") == 2


def test_a_suspend_meanwhile_waits_for_them(
    simulator: Simulator, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, compiling = threading.Event(), threading.Event()
    cached = Images.cached

    def slow(images: Images, architecture: int) -> bytes | None:
        compiling.set()
        may_go_on.wait(30)
        return cached(images, architecture)

    monkeypatch.setattr(Images, "cached", slow)
    backend = make()
    memory = filled(backend, "weights", LARGE, 1)
    assert compiling.wait(30)
    threading.Timer(0.05, may_go_on.set).start()
    backend.suspend(1)
    backend.resume()
    assert holds(memory, 1)
    assert simulator.calls("cuModuleLoadData") == 2


def test_closing_waits_for_them(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(Images, "cached", lambda *_: may_go_on.wait(30) or b"any image")
    backend = make()
    filled(backend, "weights", GRANULE_BYTES, 1)
    threading.Timer(0.05, may_go_on.set).start()
    backend.close()
    assert is_over()


def test_a_failure_is_the_first_suspends_to_tell(
    simulator: Simulator, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()

    def fails(device: int, *, packing: bool) -> None:
        raise MechanismError("no")

    monkeypatch.setattr(backend.driver, "get_ready", fails)
    memory = filled(backend, "weights", LARGE, 1)
    until(is_over)
    backend.suspend(1)
    backend.resume()
    assert holds(memory, 1)


def test_where_there_can_be_no_more_threads_nothing_is_missing(
    simulator: Simulator, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == NAME:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    memory = filled(backend, "weights", LARGE, 1)
    backend.suspend(1)
    backend.resume()
    assert holds(memory, 1)


def test_an_engine_captures_graphs_meanwhile(simulator: Simulator, make: Make) -> None:
    backend = make()
    simulator.set_capturing(True)
    with backend.region("weights") as region:
        region.buffer(LARGE)
    until(is_over)
    assert simulator.calls("cuModuleLoadData") == 2


def test_a_process_may_end_meanwhile(simulator: Simulator) -> None:
    """The driver must not go while a thread is in it."""
    code = """
import time
from sleepbackends.cumem import modules
from sleepbackends.cumem.backend import CumemBackend
cached = modules.Images.cached
def slow(*args):
    time.sleep(0.2)
    print("compiled", flush=True)
    return cached(*args)
modules.Images.cached = slow
backend = CumemBackend()
backend.allocate("weights", 1 << 20)
print("over", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(build().parent),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["over", "compiled", "compiled"]
