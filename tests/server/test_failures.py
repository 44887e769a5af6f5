"""Every error has one shape, a status code of its own kind, and the promised facts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from sleepbackends import EngineHooks, Orchestrator, errors
from sleepbackends.server import app, routes
from sleepbackends.server.failures import ErrorReply, status_of
from sleepbackends.testing import FaultInjector, SimulatedBackend, SimulatedOptions
from sleepbackends.testing.simulated import ALL
from tests.gated import SIZE, Gate, make
from tests.server.calling import Caller, client

WITHOUT = [
    ("POST", "/wake_up"),
    ("POST", "/sleep"),
    ("POST", "/release_kv_cache"),
    ("POST", "/release_kv_cache_memory"),
    ("POST", "/release_memory_occupation"),
    ("POST", "/resume_memory_occupation"),
    ("GET", "/is_sleeping"),
    ("GET", "/capabilities"),
    ("GET", "/plan?operation=sleep"),
    ("GET", "/state"),
    ("GET", "/events"),
    ("GET", "/metrics"),
]


def refusal(caller: Caller, method: str, path: str, **kwargs: object) -> tuple[int, ErrorReply]:
    response = caller(method, path, **kwargs)
    body = response.json()
    assert set(body) == set(ErrorReply.model_fields), "one shape"
    return response.status_code, ErrorReply.model_validate(body)


@pytest.mark.parametrize(("method", "path"), WITHOUT)
def test_an_unknown_parameter_is_refused_by_name(method: str, path: str) -> None:
    orchestrator = make()[0]
    mark = "&" if "?" in path else "?"
    status, error = refusal(Caller(orchestrator), method, f"{path}{mark}levle=1")
    assert status == 422
    assert "query.levle" in error.message
    assert error.hint
    assert orchestrator.state().serving


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/sleep?level=3", "InvalidLevelError"),
        ("/sleep?level=deep", "RequestError"),
        ("/sleep?mode=quickly", "RequestError"),
        ("/wake_up?tags=nobody", "UnknownTagError"),
    ],
)
def test_a_bad_value_changes_nothing(path: str, name: str) -> None:
    orchestrator = make()[0]
    status, error = refusal(Caller(orchestrator), "POST", path)
    assert (status, error.error) == (422, name)
    assert orchestrator.state().serving


@pytest.mark.parametrize(
    "query", ["", "operation=nap", "operation=sleep&tags=lora", "operation=wake_up&level=1"]
)
def test_a_plan_that_makes_no_sense_is_refused(query: str) -> None:
    assert refusal(Caller(make()[0]), "GET", f"/plan?{query}")[0] == 422


@pytest.mark.parametrize(
    "content",
    [
        b'{"tags": ["kv_cache"]',
        b'{"tags": "kv_cache"}',
        b'{"tag": []}',
        b'{"tags": ["\xff"]}',
        b'{"tags": ["\\ud800"]}',
        b"[" * 100_000,
        b"7",
    ],
    ids=lambda content: content[:20],
)
def test_a_bad_body_is_refused(content: bytes) -> None:
    orchestrator = make()[0]
    headers = {"Content-Type": "application/json"}
    path = "/release_memory_occupation"
    caller = Caller(orchestrator)
    assert refusal(caller, "POST", path, content=content, headers=headers)[0] == 422
    assert orchestrator.state().serving


def test_an_unknown_tag_of_sglang_is_refused() -> None:
    """``cuda_graph`` is one that SGLang has."""
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        body = {"tags": ["weights", "cuda_graph"]}
        status, error = refusal(Caller(make()[0]), "POST", path, json=body)
        assert (status, error.tags) == (422, ["cuda_graph"])


def test_a_missing_ability_is_501() -> None:
    options = SimulatedOptions(replace(ALL, supports_selective_resume=False))
    caller = Caller(make(options)[0])
    caller.ok("POST", "/sleep")
    status, error = refusal(caller, "POST", "/wake_up?tags=weights")
    assert (status, error.error) == (501, "UnsupportedOperationError")
    assert error.operation == "wake_up"
    assert refusal(caller, "GET", "/plan?operation=wake_up&tags=weights")[0] == 501


def test_metrics_without_prometheus_client_are_501(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise errors.UnsupportedOperationError("metrics need it", hint="pip install it")

    monkeypatch.setattr(routes, "Metrics", missing)
    caller = Caller(make()[0])
    for _ in range(2):
        assert refusal(caller, "GET", "/metrics")[0] == 501
    assert caller.ok("POST", "/sleep")["changed"]


def test_a_conflict_names_the_holder() -> None:
    orchestrator = make(timeout_s=0.05)[0]
    with orchestrator.use(holder="request 7"):
        status, error = refusal(Caller(orchestrator), "POST", "/sleep")
    assert status == 409
    assert error.holders == ["request 7"]
    assert "request 7" in error.message
    assert orchestrator.state().serving


def test_a_conflict_names_the_transition_that_goes_on() -> None:
    orchestrator, backend, _ = make(timeout_s=1.0)
    backend.saving = gate = Gate()

    async def main() -> None:
        async with client(app(orchestrator)) as http:
            first = asyncio.create_task(http.post("/sleep"))
            await asyncio.to_thread(gate.reached.wait, 10)
            second = await http.post("/sleep")
            assert second.status_code == 409
            assert second.json()["holders"][0].startswith("sleep by thread")
            assert not (await http.get("/state")).json()["serving"]
            gate.open.set()
            assert (await first).status_code == 504, "its deadline passed at the gate"

    asyncio.run(main())


def test_a_policy_in_the_way_is_409() -> None:
    caller = Caller(make()[0])
    caller.ok("POST", "/sleep?level=1")
    status, error = refusal(caller, "POST", "/sleep?level=2")
    assert (status, error.error) == (409, "PolicyConflictError")


def test_no_room_says_what_is_missing() -> None:
    orchestrator, backend, _ = make()
    caller = Caller(orchestrator)
    caller.ok("POST", "/sleep")
    backend.device.budget_bytes = SIZE
    status, error = refusal(caller, "POST", "/wake_up")
    assert (status, error.error) == (507, "DeviceMemoryError")
    assert (error.needed_bytes, error.available_bytes) == (3 * SIZE, SIZE)
    assert error.report is not None
    assert error.report.tags["weights"].offloaded_bytes == SIZE
    backend.device.budget_bytes = 3 * SIZE
    assert caller.ok("POST", "/wake_up")["serving"]


def test_another_failure_is_500_with_the_report() -> None:
    backend = SimulatedBackend()
    with backend.region("weights") as region:
        region.buffer(SIZE)
    caller = Caller(Orchestrator(backend))
    with FaultInjector(backend, {"save": [0]}):
        status, error = refusal(caller, "POST", "/sleep")
    assert status == 500
    assert error.report is not None
    assert error.report.tags["weights"].resident_bytes == SIZE
    assert caller.ok("POST", "/sleep")["changed"]


def test_a_hook_that_raises_is_500() -> None:
    orchestrator, _, engine = make()
    engine.fail["drop_caches"] = ValueError("not now")
    caller = Caller(orchestrator)
    status, error = refusal(caller, "POST", "/sleep")
    assert (status, error.error) == (500, "HookError")
    assert caller.ok("GET", "/state")["status"] == "faulted"


def test_a_bug_is_500_with_the_same_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    orchestrator = make()[0]

    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    caller = Caller(orchestrator)
    monkeypatch.setattr(orchestrator, "state", broken)
    status, error = refusal(caller, "GET", "/state")
    assert (status, error.error) == (500, "KeyError")


def test_after_close_every_call_says_so() -> None:
    orchestrator = make()[0]
    orchestrator.close()
    assert refusal(Caller(orchestrator), "POST", "/sleep")[0] == 503


@pytest.mark.parametrize(("method", "path"), [("GET", "/sleep"), ("POST", "/state"), ("GET", "/x")])
def test_no_such_route_has_the_shape_too(method: str, path: str) -> None:
    status, error = refusal(Caller(make()[0]), method, path)
    assert status in (404, 405)
    assert path in error.message


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.BusyError, 409),
        (errors.PolicyConflictError, 409),
        (errors.SuspendedError, 409),
        (errors.UnknownTagError, 422),
        (errors.UnsupportedOperationError, 501),
        (errors.ClosedError, 503),
        (errors.TransitionCancelledError, 503),
        (errors.RankLostError, 503),
        (errors.TransitionTimeoutError, 504),
        (errors.HostMemoryError, 507),
        (errors.StorageFullError, 507),
        (errors.ContentsLostError, 500),
        (errors.MechanismError, 500),
        (errors.StorageError, 500),
    ],
)
def test_each_kind_of_error_has_its_code(kind: type[errors.SleepBackendsError], code: int) -> None:
    assert status_of(kind("it happened")) == code


def test_hooks_can_be_left_out() -> None:
    backend = SimulatedBackend()
    with backend.region("kv_cache") as region:
        region.buffer(SIZE)
    assert Caller(Orchestrator(backend, hooks=EngineHooks())).ok("POST", "/sleep")["changed"]
