"""The stream of events: what it says of transitions, in order, and from where it begins."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sleepbackends import Orchestrator, UnknownTagError
from sleepbackends.server import events
from sleepbackends.server.events import KEPT, Feed
from tests.gated import SIZE, Gate, make


def parse(text: str) -> tuple[str, dict[str, Any]]:
    fields = dict(line.split(": ", 1) for line in text.strip().splitlines())
    data: dict[str, Any] = json.loads(fields["data"])
    if "id" in fields:
        assert int(fields["id"]) == data["id"]
    return fields["event"], data


async def take(stream: AsyncIterator[str], count: int) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    while len(found) < count:
        text = await asyncio.wait_for(anext(stream), 10)
        assert text.endswith("\n\n")
        if not text.startswith(":"):
            found.append(parse(text))
    return found


async def begin(stream: AsyncIterator[str]) -> None:
    assert (await anext(stream)).startswith(":"), "sent at once, so that a client sees it is there"


def in_thread(orchestrator: Orchestrator, *verbs: str) -> threading.Thread:
    thread = threading.Thread(target=lambda: [getattr(orchestrator, verb)() for verb in verbs])
    thread.start()
    return thread


def test_ended_transitions_come_in_order_by_whomever_they_were_made() -> None:
    orchestrator = make()[0]
    feed = Feed(orchestrator)

    async def main() -> None:
        stream = feed.stream()
        await begin(stream)
        thread = in_thread(orchestrator, "sleep", "wake_up", "release_kv_cache")
        found: list[dict[str, Any]] = []
        while len(found) < 3:
            found += [data for name, data in await take(stream, 1) if name == "ended"]
        assert [data["id"] for data in found] == [1, 2, 3]
        assert [data["operation"] for data in found] == ["sleep", "wake_up", "release"]
        sleep = found[0]["reply"]
        assert (sleep["from"], sleep["to"]) == ("awake", "weights_offloaded")
        assert sleep["tags"]["weights"]["offloaded_bytes"] == SIZE
        assert found[0]["error"] is None
        thread.join()

    asyncio.run(main())


def test_a_failure_is_told_with_its_error() -> None:
    orchestrator = make()[0]
    feed = Feed(orchestrator)
    with pytest.raises(UnknownTagError):
        orchestrator.release({"nobody", "\ud800"})

    async def main() -> None:
        ((name, data),) = await take(feed.stream(0), 1)
        assert (name, data["reply"]) == ("ended", None)
        assert data["error"]["error"] == "UnknownTagError"
        assert data["error"]["tags"] == ["nobody", "\\ud800"]

    asyncio.run(main())


def test_progress_is_told_while_a_transition_goes_on() -> None:
    orchestrator, backend, _ = make()
    feed = Feed(orchestrator)
    backend.saving = gate = Gate()

    async def main() -> None:
        stream = feed.stream()
        await begin(stream)
        thread = in_thread(orchestrator, "sleep")
        await asyncio.to_thread(gate.reached.wait, 10)
        name, data = (await take(stream, 1))[-1]
        while data["done_bytes"] == 0:
            name, data = (await take(stream, 1))[-1]
        assert (name, data["step"]) == ("progress", "suspend")
        assert (data["done_bytes"], data["total_bytes"]) == (SIZE, 2 * SIZE)
        gate.open.set()
        while name == "progress":
            name, data = (await take(stream, 1))[-1]
        assert (name, data["operation"]) == ("ended", "sleep")
        thread.join()

    asyncio.run(main())


def test_a_stream_begins_with_what_comes_next_or_after_an_id() -> None:
    orchestrator = make()[0]
    feed = Feed(orchestrator)
    for _ in range(2):
        orchestrator.sleep()
        orchestrator.wake_up()

    async def main() -> None:
        assert [data["id"] for _, data in await take(feed.stream(0), 4)] == [1, 2, 3, 4]
        assert [data["id"] for _, data in await take(feed.stream(2), 2)] == [3, 4]
        new, restarted = feed.stream(), feed.stream(99)
        await begin(new)
        await asyncio.to_thread(orchestrator.sleep)
        assert [data["id"] for _, data in await take(new, 1)] == [5]
        ids = [data["id"] for _, data in await take(restarted, 5)]
        assert ids == [1, 2, 3, 4, 5], "an id from before a restart is not waited for"

    asyncio.run(main())


def test_a_slow_stream_misses_the_oldest_and_costs_no_more_memory() -> None:
    orchestrator = make()[0]
    feed = Feed(orchestrator)

    async def main() -> None:
        stream = feed.stream()
        await begin(stream)
        for _ in range(KEPT):
            orchestrator.release_kv_cache()
            orchestrator.wake_up()
        ids = [data["id"] for _, data in await take(stream, KEPT)]
        assert ids == list(range(KEPT + 1, 2 * KEPT + 1))

    asyncio.run(main())


def test_a_quiet_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_KEEPALIVE_S", 0.05)
    feed = Feed(make()[0])

    async def main() -> None:
        stream = feed.stream()
        await begin(stream)
        assert (await asyncio.wait_for(anext(stream), 5)).startswith(":")

    asyncio.run(main())


def test_a_stream_that_was_left_is_told_nothing_more() -> None:
    orchestrator = make()[0]
    feed = Feed(orchestrator)

    async def main() -> None:
        stream = feed.stream()
        await begin(stream)
        assert len(feed._waiting) == 1
        await stream.aclose()  # type: ignore[attr-defined]
        assert not feed._waiting
        orchestrator.sleep()

    asyncio.run(main())
