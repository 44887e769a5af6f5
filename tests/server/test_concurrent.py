"""Many clients at once: every request is answered, and no two answers contradict each other."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import pairwise
from typing import Any

from sleepbackends.observers import Observation
from sleepbackends.server import app
from sleepbackends.server.failures import ErrorReply
from sleepbackends.server.models import TransitionReply
from tests.gated import SIZE, TAGS, Gate, make
from tests.server.calling import client

CLIENTS, CALLS = 16, 10_000
POSTS: list[tuple[str, Any]] = [
    ("/sleep?level=0", None),
    ("/sleep?level=1&mode=abort", None),
    ("/sleep?level=2", None),
    ("/wake_up", None),
    ("/wake_up?tags=weights&tags=lora", None),
    ("/wake_up?tags=kv_cache", None),
    ("/release_kv_cache", None),
    ("/release_memory_occupation", {"tags": ["weights"]}),
    ("/resume_memory_occupation", {}),
]
GETS = ["/state", "/is_sleeping", "/plan?operation=wake_up", "/capabilities", "/metrics"]


def check_bytes(tags: dict[str, dict[str, int]]) -> None:
    assert set(tags) == set(TAGS)
    for tag in tags.values():
        assert sum(size for name, size in tag.items() if name != "epoch") == SIZE


def check(path: str, status: int, body: dict[str, Any]) -> None:
    if status != 200:
        assert status == 409, body
        assert ErrorReply.model_validate(body).error == "PolicyConflictError"
    elif "changed" in body:
        check_bytes(body["tags"])
        if not body["changed"]:
            assert body["from"] == body["to"]
        if path == "/wake_up":
            assert (body["to"], body["serving"]) == ("awake", True)
        if path == "/release_kv_cache":
            assert body["tags"]["kv_cache"]["discarded_bytes"] == SIZE
    elif "status" in body:
        check_bytes(body["tags"])
        assert body["serving"] == (body["status"] == "awake")


def as_told(body: dict[str, Any]) -> tuple[Any, ...]:
    """What a reply to a transition says, but for how long it took."""
    tags = [(name, *sorted(tag.items())) for name, tag in sorted(body["tags"].items())]
    return (body["operation"], body["changed"], body["from"], body["to"], *tags)


def test_ten_thousand_mixed_calls_of_sixteen_clients() -> None:
    orchestrator, backend, _ = make()
    statuses: Counter[int] = Counter()
    ended: list[Observation] = []
    replies: Counter[Any] = Counter()
    orchestrator.observers.add(ended.append)

    async def calls(seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311 - no secret
        async with client(application) as http:
            for _ in range(CALLS // CLIENTS):
                if chance.random() < 0.4:
                    path = chance.choice(GETS)
                    response = await http.get(path)
                else:
                    path, body = chance.choice(POSTS)
                    response = await http.post(path, json=body)
                statuses[response.status_code] += 1
                if path != "/metrics":
                    body = response.json()
                    check(path, response.status_code, body)
                    if "changed" in body:
                        replies[as_told(body)] += 1

    async def main() -> None:
        await asyncio.wait_for(asyncio.gather(*map(calls, range(CLIENTS))), 200)
        async with client(application) as http:
            for _ in range(2):
                last = (await http.post("/wake_up")).json()
            assert last["serving"]

    application = app(orchestrator)
    asyncio.run(main())
    assert statuses.total() == CALLS
    assert statuses[200] > CALLS / 2
    assert statuses[409], "levels and tags were mixed"
    reports = [seen.report for seen in ended if seen.report is not None]
    told = reports[:-2]  # the last two were not the clients'
    assert sum(report.changed for report in reports) > 100
    # What clients were told is what happened, and each happened where the one before it ended.
    assert replies == Counter(
        as_told(TransitionReply.of(r).model_dump(by_alias=True)) for r in told
    )
    for former, later in pairwise(reports):
        assert later.sleep_state_before == former.sleep_state
    assert len(backend.mapped) == len(TAGS)


def test_queries_are_answered_while_a_transition_goes_on_and_while_asleep() -> None:
    orchestrator, backend, _ = make()
    backend.saving = gate = Gate()

    async def main() -> None:
        async with client(app(orchestrator)) as http:
            going_on = asyncio.create_task(http.post("/sleep"))
            await asyncio.to_thread(gate.reached.wait, 10)
            for path in GETS:
                assert (await asyncio.wait_for(http.get(path), 5)).status_code == 200
            state = (await http.get("/state")).json()
            assert state["progress"]["step"] == "suspend"
            assert 0 < state["progress"]["done_bytes"] < state["progress"]["total_bytes"]
            assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
            gate.open.set()
            assert (await going_on).json()["changed"]
            for path in GETS:
                assert (await asyncio.wait_for(http.get(path), 5)).status_code == 200

    asyncio.run(main())


def test_a_client_that_goes_away_does_not_undo_its_call() -> None:
    orchestrator, backend, _ = make()
    backend.saving = gate = Gate()
    sent: list[Any] = []

    async def main() -> None:
        messages = iter([{"type": "http.request", "body": b""}])

        async def receive() -> Any:
            return next(messages, {"type": "http.disconnect"})

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "POST",
            "path": "/sleep",
            "raw_path": b"/sleep",
            "query_string": b"",
            "headers": [(b"host", b"localhost")],
            "root_path": "",
            "scheme": "http",
        }
        call = asyncio.create_task(app(orchestrator)(scope, receive, send))
        await asyncio.to_thread(gate.reached.wait, 10)
        gate.open.set()
        await asyncio.wait_for(call, 10)

    asyncio.run(main())
    assert orchestrator.state().memory.asleep_bytes == 3 * SIZE
