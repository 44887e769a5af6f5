"""Kernels are there before the first suspend asks for them, and nobody pays for that twice."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator

import pytest

from sleepbackends.cumem.images import Images
from sleepbackends.errors import MechanismError, SleepBackendsError
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.vmm.driver import KernelUse
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

KERNELS = ("fingerprint", "packing")


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


class SlowCompiler:
    """Compiles when it is told to.

    Parameters
    ----------
    monkeypatch : MonkeyPatch
        Puts it in the place of the real one.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = {name: threading.Event() for name in KERNELS}
        self.began = {name: threading.Event() for name in KERNELS}
        cached = Images.cached

        def slow(images: Images, architecture: int) -> bytes | None:
            name = images._source.name
            self.began[name].set()
            assert self.may_go_on[name].wait(30)
            return cached(images, architecture)

        monkeypatch.setattr(Images, "cached", slow)

    def finish(self, *names: str) -> None:
        for name in names or KERNELS:
            self.may_go_on[name].set()


@pytest.fixture
def compiler(make: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowCompiler]:
    found = SlowCompiler(monkeypatch)
    yield found
    found.finish()


def test_a_suspend_does_not_wait_for_the_compiler(
    simulator: Simulator, make: Make, compiler: SlowCompiler
) -> None:
    backend = make()
    memory = filled(backend, "weights", LARGE, 1)
    for _ in range(2):
        report = backend.suspend(1)
        assert (report.copied_bytes, report.spared_bytes) == (LARGE, 0)
        backend.resume()
        assert holds(memory, 1)
    assert simulator.calls("cuModuleLoadData") == 0
    compiler.finish()
    until(is_over)
    assert simulator.calls("cuModuleLoadData") == 2
    assert backend.suspend(1).copied_bytes == LARGE
    backend.resume()
    assert backend.suspend(1).clean_bytes == LARGE
    backend.resume()
    assert holds(memory, 1)


def test_what_is_compiled_is_used_before_the_rest_is(
    simulator: Simulator, make: Make, compiler: SlowCompiler
) -> None:
    backend = make()
    memory = filled(backend, "weights", LARGE, 1)
    compiler.finish("fingerprint")
    assert compiler.began["packing"].wait(30)
    report = backend.suspend(1)
    assert (report.copied_bytes, report.spared_bytes) == (LARGE, 0)
    backend.resume()
    assert backend.suspend(1).clean_bytes == LARGE
    backend.resume()
    assert holds(memory, 1)


def test_nothing_is_loaded_while_memory_is_away(
    simulator: Simulator, make: Make, compiler: SlowCompiler
) -> None:
    """What loading takes could be missing when the memory is to come back."""
    backend = make()
    weights, cache = (filled(backend, tag, LARGE, 1) for tag in ("weights", "kv_cache"))
    keep = Policies({"kv_cache": TagPolicy(Policy.OFFLOAD, Policy.OFFLOAD)})
    backend.suspend(1, policies=keep)
    compiler.finish()
    until(is_over)
    assert simulator.device_usage().used_bytes == 0
    backend.resume(["weights"])
    assert simulator.calls("cuModuleLoadData") == 0
    backend.resume()
    assert simulator.calls("cuModuleLoadData") == 2
    report = backend.suspend(1, policies=keep)
    assert (report.copied_bytes, report.clean_bytes) == (LARGE, LARGE), "the last one is known"
    backend.resume()
    assert holds(weights, 1)
    assert holds(cache, 1)


def test_a_device_does_not_wait_for_the_memory_of_another(
    simulator: Simulator, make: Make, compiler: SlowCompiler
) -> None:
    backend = make()
    filled(backend, "weights", LARGE, 1)
    backend.suspend(1)
    compiler.finish()
    memory = filled(backend, "kv_cache", LARGE, 1, 1)
    until(is_over)
    assert simulator.calls("cuModuleLoadData") == 2
    assert simulator.device_usage(0).used_bytes == 0
    backend.resume()
    assert holds(memory, 1)


def test_discarded_memory_is_away_as_well(
    simulator: Simulator, make: Make, compiler: SlowCompiler
) -> None:
    backend = make()
    filled(backend, "kv_cache", LARGE, 1)
    backend.discard(["kv_cache"])
    compiler.finish()
    until(is_over)
    assert simulator.device_usage().used_bytes == 0
    backend.resume()
    assert simulator.calls("cuModuleLoadData") == 2


def test_an_undone_suspend_takes_no_memory_away(
    simulator: Simulator, make: Make, compiler: SlowCompiler
) -> None:
    backend = make()
    memory = filled(backend, "weights", LARGE, 1)
    filled(backend, "lora", LARGE, 1)
    simulator.fail("cuMemUnmap", 999, nth=2)
    with pytest.raises(SleepBackendsError):
        backend.suspend(1)
    simulator.clear_faults()
    compiler.finish()
    until(is_over)
    backend.resume()
    assert simulator.calls("cuModuleLoadData") == 2
    assert holds(memory, 1)


def test_a_suspend_that_fits_only_packed_waits(
    simulator: Simulator, make: Make, compiler: SlowCompiler
) -> None:
    backend = make(host_budget_bytes=LARGE * 3 // 4)
    memory = filled(backend, "weights", LARGE, 1)
    threading.Timer(0.05, compiler.finish).start()
    assert backend.suspend(1).spared_bytes > 0
    backend.resume()
    assert holds(memory, 1)


def test_a_staging_waits_and_a_suspend_not_for_it(
    make: Make, compiler: SlowCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    memory = filled(backend, "weights", LARGE, 1)
    waits, wait = threading.Event(), backend._warm_up.wait

    def noted(devices: Iterable[int]) -> None:
        waits.set()
        wait(devices)

    monkeypatch.setattr(backend._warm_up, "wait", noted)
    staging = backend.stage()
    assert waits.wait(30)
    assert backend.suspend(1).copied_bytes == LARGE
    backend.resume()
    assert not staging.done
    compiler.finish()
    staging.wait(30)
    assert backend.suspend(1).clean_bytes == LARGE
    backend.resume()
    assert holds(memory, 1)


def test_what_the_device_cannot_tell_about_restored_memory_stays_unknown(
    simulator: Simulator, make: Make, compiler: SlowCompiler
) -> None:
    backend = make()
    memory = filled(backend, "weights", LARGE, 1)
    backend.suspend(1)
    compiler.finish()
    until(is_over)
    simulator.fail("cuLaunchKernel", 999, times=None)
    backend.resume()
    simulator.clear_faults()
    assert holds(memory, 1)
    assert backend.suspend(1).copied_bytes == LARGE
    backend.resume()
    assert backend.suspend(1).clean_bytes == LARGE
    backend.resume()
    assert holds(memory, 1)


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

    def fails(device: int, use: KernelUse) -> None:
        raise MechanismError("no")

    monkeypatch.setattr(backend.driver, "load", fails)
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
from sleepbackends.cumem import images
from sleepbackends.cumem.backend import CumemBackend
cached = images.Images.cached
def slow(*args):
    time.sleep(0.2)
    print("compiled", flush=True)
    return cached(*args)
images.Images.cached = slow
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
