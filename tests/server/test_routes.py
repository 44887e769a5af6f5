"""Each route, as a client sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI

from sleepbackends import AsyncOrchestrator, Capabilities
from sleepbackends.metrics import Metrics
from sleepbackends.server import router
from sleepbackends.server.failures import ErrorReply
from sleepbackends.testing import SimulatedOptions
from sleepbackends.testing.simulated import ALL
from tests.gated import SIZE, make
from tests.server.calling import Caller

UNSELECTIVE = replace(ALL, supports_selective_release=False, supports_selective_resume=False)


def bytes_of(tag: dict[str, Any]) -> dict[str, int]:
    return {name: size for name, size in tag.items() if size and name != "epoch"}


def test_sleep_and_wake_up_say_what_happened() -> None:
    caller = Caller(make()[0])
    asleep = caller.ok("POST", "/sleep?level=1")
    assert asleep["changed"]
    assert (asleep["from"], asleep["to"]) == ("awake", "weights_offloaded")
    assert asleep["released_bytes"] == 3 * SIZE
    assert bytes_of(asleep["tags"]["weights"]) == {"offloaded_bytes": SIZE}
    assert bytes_of(asleep["tags"]["kv_cache"]) == {"discarded_bytes": SIZE}
    assert asleep["tags"]["kv_cache"]["epoch"] == 1
    assert caller.ok("GET", "/is_sleeping") == {"is_sleeping": True}
    assert not caller.ok("POST", "/sleep?level=1")["changed"]
    awake = caller.ok("POST", "/wake_up")
    assert (awake["from"], awake["to"], awake["serving"]) == ("weights_offloaded", "awake", True)
    assert caller.ok("GET", "/is_sleeping") == {"is_sleeping": False}


def test_wake_up_takes_tags_more_than_once() -> None:
    caller = Caller(make()[0])
    caller.ok("POST", "/sleep?level=2&mode=abort")
    part = caller.ok("POST", "/wake_up?tags=weights&tags=lora")
    assert not part["serving"]
    assert bytes_of(part["tags"]["kv_cache"]) == {"discarded_bytes": SIZE}
    assert bytes_of(part["tags"]["lora"]) == {"resident_bytes": SIZE}
    assert caller.ok("POST", "/wake_up?tags=kv_cache")["serving"]


def test_the_mode_reaches_the_engine() -> None:
    orchestrator, _, engine = make()
    Caller(orchestrator).ok("POST", "/sleep?level=0&mode=keep")
    assert ("quiesce", "keep") in engine.calls


@pytest.mark.parametrize("path", ["/release_kv_cache", "/release_kv_cache_memory"])
def test_release_leaves_the_rest_resident(path: str) -> None:
    caller = Caller(make()[0])
    reply = caller.ok("POST", path)
    assert (reply["from"], reply["to"]) == ("awake", "kv_cache_released")
    assert (reply["strategy"], reply["degraded"]) == ("selective", False)
    assert bytes_of(reply["tags"]["weights"]) == {"resident_bytes": SIZE}
    again = caller.ok("POST", path)
    assert (again["changed"], again["from"]) == (False, "kv_cache_released")


def test_a_degraded_release_says_so_and_why() -> None:
    caller = Caller(make(SimulatedOptions(UNSELECTIVE))[0])
    reply = caller.ok("POST", "/release_kv_cache")
    assert reply["degraded"]
    assert reply["strategy"] == "full_suspend"
    assert reply["reason"]


def test_a_release_that_is_repeated_after_a_wake_up_began_awake() -> None:
    """What it drops was released before: the older epoch must not be taken for the newer."""
    caller = Caller(make()[0])
    for _ in range(2):
        reply = caller.ok("POST", "/release_kv_cache")
        assert (reply["from"], reply["to"]) == ("awake", "kv_cache_released")
        assert caller.ok("POST", "/wake_up")["from"] == "kv_cache_released"


@pytest.mark.parametrize("body", [None, {}, {"tags": None}, {"tags": []}, {"rid": "1"}])
def test_sglang_releases_and_resumes_everything(body: dict[str, Any] | None) -> None:
    caller = Caller(make()[0])
    reply = caller.ok("POST", "/release_memory_occupation", json=body)
    assert reply["to"] == "weights_offloaded"
    assert reply["released_bytes"] == 3 * SIZE
    assert caller.ok("POST", "/resume_memory_occupation", json=body)["serving"]


def test_sglang_releases_and_resumes_by_tag_without_losing_weights() -> None:
    orchestrator, backend, _ = make()
    caller = Caller(orchestrator)
    first = caller.ok("POST", "/release_memory_occupation", json={"tags": ["kv_cache"]})
    assert (first["operation"], first["to"]) == ("release", "kv_cache_released")
    second = caller.ok("POST", "/release_memory_occupation", json={"tags": ["weights"]})
    assert bytes_of(second["tags"]["weights"]) == {"offloaded_bytes": SIZE}
    assert bytes_of(second["tags"]["lora"]) == {"resident_bytes": SIZE}
    assert not caller.ok("POST", "/resume_memory_occupation", json={"tags": ["weights"]})["serving"]
    assert bytes(b"w" * SIZE) in backend.mapped.values()
    assert caller.ok("POST", "/resume_memory_occupation", json={"tags": ["kv_cache"]})["serving"]


def test_capabilities_are_those_of_the_backend() -> None:
    reply = Caller(make(SimulatedOptions(UNSELECTIVE))[0]).ok("GET", "/capabilities")
    assert reply["backend"] == "simulated"
    assert tuple(reply["capabilities"]) == Capabilities.names()
    assert reply["capabilities"]["supports_offload"]
    assert not reply["capabilities"]["supports_selective_release"]


def test_plans_are_those_of_the_orchestrator() -> None:
    caller = Caller(make()[0])
    sleep = caller.ok("GET", "/plan?operation=sleep&level=2")
    assert (sleep["changes"], sleep["size_bytes"]) == (True, 3 * SIZE)
    assert sleep["tags"]["weights"]["policy"] == "discard"
    assert sleep["tags"]["lora"] == {"policy": "offload", "size_bytes": SIZE, "copied_bytes": SIZE}
    release = caller.ok("GET", "/plan?operation=release")
    assert list(release["tags"]) == ["kv_cache"]
    assert release["strategy"] == "selective"
    assert not caller.ok("GET", "/plan?operation=wake_up&tags=weights")["changes"]
    assert caller.get("/plan?operation=release&tags=nobody").status_code == 422
    assert caller.ok("GET", "/state")["sleep_state"] == "awake"


def test_the_state_has_every_tag() -> None:
    caller = Caller(make()[0])
    caller.ok("POST", "/sleep?level=1")
    state = caller.ok("GET", "/state")
    assert (state["status"], state["serving"], state["progress"]) == ("asleep", False, None)
    assert bytes_of(state["tags"]["lora"]) == {"offloaded_bytes": SIZE}


def test_metrics_are_exported() -> None:
    caller = Caller(make()[0])
    caller.ok("POST", "/release_kv_cache")
    response = caller.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    line = 'sleepbackends_engine_sleep_state{engine="0",sleep_state="kv_cache_released"} 1.0'
    assert line in response.text


def test_metrics_of_the_application_are_used() -> None:
    orchestrator = make()[0]
    metrics = Metrics()
    metrics.observe(orchestrator, engine="llama")
    application = FastAPI()
    application.include_router(router(AsyncOrchestrator(orchestrator), metrics=metrics))
    assert 'engine="llama"' in Caller(application).get("/metrics").text


def test_it_can_be_mounted_under_a_prefix_next_to_other_routes() -> None:
    application = FastAPI()

    @application.get("/health")
    def health() -> str:
        return "ok"

    application.include_router(router(make()[0]), prefix="/memory")
    caller = Caller(application)
    assert caller.get("/health").json() == "ok"
    assert caller.ok("POST", "/memory/sleep")["changed"]
    failed = caller.post("/memory/sleep?level=7")
    assert failed.status_code == 422
    assert ErrorReply.model_validate(failed.json()).error == "InvalidLevelError"


def test_the_openapi_document_is_the_contract() -> None:
    document = Caller(make()[0]).ok("GET", "/openapi.json")
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            errors = [code for code in operation["responses"] if code >= "4"]
            assert {"409", "422", "501", "504", "507", "500"} <= set(errors), (method, path)
            for code in errors:
                schema = operation["responses"][code]["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorReply"}
    reply = document["components"]["schemas"]["TransitionReply"]
    assert {"changed", "from", "to", "tags", "degraded", "reason"} <= set(reply["required"])


def test_docs_are_off_unless_asked_for() -> None:
    assert Caller(make()[0]).get("/docs").status_code == 404
