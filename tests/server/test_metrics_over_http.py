"""``kv_cache_released`` over HTTP: 1 only after a release that happened."""

from __future__ import annotations

from dataclasses import replace

from sleepbackends.testing import FaultInjector, SimulatedOptions
from sleepbackends.testing.simulated import ALL
from tests.gated import make
from tests.server.calling import Caller

LINE = 'sleepbackends_engine_sleep_state{engine="0",sleep_state="%s"} '


def state_of(caller: Caller) -> str:
    """The one state that is 1."""
    text = caller.get("/metrics").text
    names = ("awake", "weights_offloaded", "discard_all", "kv_cache_released")
    values = {name: text.split(LINE % name)[1].split("\n")[0] for name in names}
    assert sorted(values.values()) == ["0.0", "0.0", "0.0", "1.0"]
    return next(name for name, value in values.items() if value == "1.0")


def test_a_release_that_happened_and_one_that_is_repeated() -> None:
    caller = Caller(make()[0])
    assert state_of(caller) == "awake"
    assert caller.ok("POST", "/release_kv_cache")["changed"]
    assert state_of(caller) == "kv_cache_released"
    assert not caller.ok("POST", "/release_kv_cache")["changed"]
    assert state_of(caller) == "kv_cache_released"
    caller.ok("POST", "/wake_up")
    assert state_of(caller) == "awake"
    caller.ok("POST", "/sleep")
    assert not caller.ok("POST", "/release_kv_cache")["changed"], "the sleep has dropped it"
    assert state_of(caller) == "weights_offloaded"


def test_a_release_that_is_refused() -> None:
    options = SimulatedOptions(replace(ALL, supports_selective_release=False))
    caller = Caller(make(options, on_unselective="error")[0])
    assert caller.post("/release_kv_cache").status_code == 501
    assert state_of(caller) == "awake"
    assert caller.post("/release_kv_cache?tags=weights").status_code == 422
    assert state_of(caller) == "awake"


def test_a_release_that_failed_until_it_succeeds() -> None:
    orchestrator, backend, _ = make()
    caller = Caller(orchestrator)
    with FaultInjector(backend, {"unmap": [0]}):
        assert caller.post("/release_kv_cache").status_code == 500
    assert state_of(caller) == "awake"
    caller.ok("POST", "/release_kv_cache")
    assert state_of(caller) == "kv_cache_released"
