"""What stands around an orchestrator works over ranks as it does over one backend."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest
from prometheus_client import generate_latest

from sleepbackends import AsyncOrchestrator, Orchestrator, RankLostError, SleepConfig
from sleepbackends.metrics import Metrics
from sleepbackends.ranks import InProcessGroup, Rank, RankGroup
from sleepbackends.ranks.messages import Answer, Command, Step
from sleepbackends.testing import FakeEngine
from tests.ranks.parts import SIZE, Parts, simulated
from tests.server.calling import Caller


def engine(count: int = 2, **config: Any) -> tuple[Orchestrator, list[Parts]]:
    parts = simulated(count)
    group = InProcessGroup([part.backend for part in parts], timeout_s=20.0, grace_s=1.0)
    hooks = FakeEngine().hooks()
    return Orchestrator(group, config=SleepConfig(**config), hooks=hooks), parts


def test_over_http() -> None:
    orchestrator, parts = engine()
    caller = Caller(orchestrator)
    assert caller.ok("GET", "/capabilities")["backend"] == "ranks"
    reply = caller.ok("POST", "/release_kv_cache")
    assert (reply["to"], reply["released_bytes"]) == ("kv_cache_released", 4 * SIZE)
    state = caller.ok("GET", "/state")
    assert state["tags"]["kv_cache"]["discarded_bytes"] == 4 * SIZE
    assert state["ranks"]["1"]["kv_cache"]["discarded_bytes"] == 2 * SIZE
    caller.ok("POST", "/wake_up")
    parts[1].break_at({"check_room_to_save": [0]})
    response = caller.post("/sleep")
    assert response.status_code == 500
    assert response.json()["message"].startswith("rank 1: suspend failed")
    assert not response.json()["report"]["changed"]
    parts[1].break_at({})
    caller.ok("POST", "/sleep")
    parts[1].backend.device.budget_bytes = SIZE
    response = caller.post("/wake_up")
    assert response.status_code == 507
    assert response.json()["available_bytes"] == SIZE
    assert response.json()["message"].startswith("rank 1: ")
    parts[1].backend.device.budget_bytes = 1 << 30
    assert caller.ok("POST", "/wake_up")["serving"]


def test_metrics_are_sums_over_ranks() -> None:
    orchestrator, _ = engine(3)
    metrics = Metrics()
    metrics.observe(orchestrator)
    orchestrator.sleep()
    text = generate_latest(metrics.registry).decode()
    assert f'tag="weights"}} {float(6 * SIZE)}' in text
    assert 'sleep_state="weights_offloaded"} 1.0' in text
    assert f'copied_bytes_total{{engine="0",operation="sleep"}} {float(12 * SIZE)}' in text


def test_in_an_event_loop() -> None:
    orchestrator, parts = engine()

    async def main() -> None:
        async with AsyncOrchestrator(orchestrator) as awaited:
            call = awaited.sleep()
            seen = [progress async for progress in call]
            assert (await call).released_bytes == 12 * SIZE
            assert seen[-1].done_bytes == 8 * SIZE
            assert (await awaited.wake_up()).serving
            assert all(part.holds("weights") for part in parts)

    asyncio.run(main())


class Mortal:
    """A rank whose process ends when it hears a certain command."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.dies_at: Step | None = None
        self.dead = False

    def ask(self, command: Command) -> Future[Answer]:
        self.dead |= command.step is self.dies_at
        if not self.dead:
            return self.rank.ask(command)
        gone: Future[Answer] = Future()
        gone.set_exception(RankLostError("it was killed"))
        return gone


@pytest.mark.parametrize("dies_at", [Step.LOOK, Step.BEGIN, Step.PROCEED])
@pytest.mark.parametrize("verb", ["sleep", "wake_up"])
def test_a_rank_that_has_gone_is_503_and_the_others_are_as_before(verb: str, dies_at: Step) -> None:
    parts = simulated(3)
    mortal = Mortal(Rank(parts[2].backend))
    group = RankGroup({0: Rank(parts[0].backend), 1: Rank(parts[1].backend), 2: mortal})
    caller = Caller(Orchestrator(group))
    if verb == "wake_up":
        caller.ok("POST", "/sleep")
    before = [part.backend.state().asleep_tags() for part in parts[:2]]
    mortal.dies_at = dies_at
    response = caller.post(f"/{verb}")
    assert response.status_code == 503
    assert response.json()["error"] == "RankLostError"
    assert "rank 2 has gone: it was killed" in response.json()["message"]
    assert [part.backend.state().asleep_tags() for part in parts[:2]] == before
    assert group.forget_lost() == (2,)
    assert caller.ok("POST", f"/{verb}")["changed"]
    assert set(caller.ok("GET", "/state")["ranks"]) == {"0", "1"}
