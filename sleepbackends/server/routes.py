"""The routes: vLLM's and SGLang's calls, and our own, over one orchestrator."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Query
from starlette.responses import Response, StreamingResponse

from sleepbackends.aio import AsyncOrchestrator
from sleepbackends.calls import Call
from sleepbackends.engine_state import EngineReport
from sleepbackends.errors import RequestError, UnsupportedOperationError
from sleepbackends.metrics import Metrics
from sleepbackends.orchestrator import Orchestrator
from sleepbackends.plan import Plan
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.server.events import Feed
from sleepbackends.server.failures import RESPONSES, Route
from sleepbackends.server.models import (
    CapabilitiesReply,
    EventsQuery,
    NoQuery,
    OccupationBody,
    PlanQuery,
    PlanReply,
    SleepingReply,
    SleepQuery,
    StateReply,
    TransitionReply,
    WakeQuery,
    wanted,
)
from sleepbackends.state import check_tags

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Events, for ever."}
}
_TEXT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {}}, "description": "The Prometheus text format."}
}
_NoParameters = Annotated[NoQuery, Query()]


def router(
    orchestrator: Orchestrator | AsyncOrchestrator,
    *,
    metrics: Metrics | None = None,
    engine: str = "0",
) -> APIRouter:
    """Make the routes of one engine, to be included in an application.

    A call waits for its turn, and for work under ``use()``, as long as the configuration's
    ``timeout_s`` allows; everything else replies at once, asleep or awake. A client that goes
    away does not undo what it asked for.

    Parameters
    ----------
    orchestrator : Orchestrator or AsyncOrchestrator
        What does the work. It is not closed.
    metrics : Metrics, optional
        What ``/metrics`` exports, if the application has one that observes this engine
        already. By default one of its own, if ``prometheus_client`` is installed.
    engine : str
        The engine's name in metrics of its own.
    """
    asynchronous = as_async(orchestrator)
    return make_routes(asynchronous, Feed(asynchronous.orchestrator), metrics, engine)


def as_async(orchestrator: Orchestrator | AsyncOrchestrator) -> AsyncOrchestrator:
    """Return an asynchronous orchestrator over what was given, or that itself."""
    if isinstance(orchestrator, Orchestrator):
        return AsyncOrchestrator(orchestrator)
    return orchestrator


def make_routes(
    orchestrator: AsyncOrchestrator, feed: Feed, metrics: Metrics | None, engine: str
) -> APIRouter:
    """Make the routes over a feed that the caller can end."""
    routes = APIRouter(route_class=Route, responses=RESPONSES)
    _add_transitions(routes, orchestrator)
    _add_queries(routes, orchestrator)
    _add_streams(routes, orchestrator, feed, metrics, engine)
    return routes


async def _reply(call: Call[EngineReport]) -> TransitionReply:
    return TransitionReply.of(await call)


def _add_transitions(routes: APIRouter, orchestrator: AsyncOrchestrator) -> None:
    @routes.post("/sleep")
    async def sleep(query: Annotated[SleepQuery, Query()]) -> TransitionReply:
        """Stop serving and release memory."""
        return await _reply(orchestrator.sleep(query.level, mode=query.mode))

    @routes.post("/wake_up")
    async def wake_up(query: Annotated[WakeQuery, Query()]) -> TransitionReply:
        """Take memory again, and serve once everything is there."""
        return await _reply(orchestrator.wake_up(wanted(query.tags)))

    @routes.post("/release_kv_cache")
    async def release_kv_cache(_: _NoParameters) -> TransitionReply:
        """Release the KV cache and leave the rest resident."""
        return await _reply(orchestrator.release_kv_cache())

    @routes.post("/release_kv_cache_memory")
    async def release_kv_cache_memory(_: _NoParameters) -> TransitionReply:
        """Do the same, by the name that vLLM gives it."""
        return await _reply(orchestrator.release_kv_cache())

    @routes.post("/release_memory_occupation")
    async def release_memory_occupation(
        _: _NoParameters, body: Annotated[OccupationBody | None, Body()] = None
    ) -> TransitionReply:
        """Release memory of the named tags, or of all, without losing what level 1 keeps."""
        return await _reply(_release(orchestrator, wanted(body.tags if body else None)))

    @routes.post("/resume_memory_occupation")
    async def resume_memory_occupation(
        _: _NoParameters, body: Annotated[OccupationBody | None, Body()] = None
    ) -> TransitionReply:
        """Take memory of the named tags again, or of all."""
        return await _reply(orchestrator.wake_up(wanted(body.tags if body else None)))


def _add_queries(routes: APIRouter, orchestrator: AsyncOrchestrator) -> None:
    @routes.get("/is_sleeping")
    async def is_sleeping(_: _NoParameters) -> SleepingReply:
        """Tell whether the engine does not serve."""
        return SleepingReply(is_sleeping=not orchestrator.state().serving)

    @routes.get("/capabilities")
    async def capabilities(_: _NoParameters) -> CapabilitiesReply:
        """Tell what the backend can do."""
        return CapabilitiesReply(
            backend=orchestrator.orchestrator.backend.name,
            capabilities=asdict(orchestrator.capabilities),
        )

    @routes.get("/plan")
    async def plan(query: Annotated[PlanQuery, Query()]) -> PlanReply:
        """Tell what a call would do, or how it would be refused."""
        return PlanReply.of(_plan(orchestrator, query))

    @routes.get("/state")
    async def state(_: _NoParameters) -> StateReply:
        """Tell what is where."""
        return StateReply.of(orchestrator.state())


def _add_streams(
    routes: APIRouter,
    orchestrator: AsyncOrchestrator,
    feed: Feed,
    metrics: Metrics | None,
    engine: str,
) -> None:
    missing: UnsupportedOperationError | None = None
    if metrics is None:
        try:
            metrics = Metrics()
            metrics.observe(orchestrator.orchestrator, engine)
        except UnsupportedOperationError as error:
            missing = error

    @routes.get("/events", response_class=StreamingResponse, responses=_STREAM)
    async def events(
        query: Annotated[EventsQuery, Query()],
        last_event_id: Annotated[int | None, Header(ge=0)] = None,
    ) -> StreamingResponse:
        """Stream transitions that ended and the progress of the one that goes on."""
        since = query.since if last_event_id is None else last_event_id
        return StreamingResponse(
            feed.stream(since),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    @routes.get("/metrics", response_class=Response, responses=_TEXT)
    def scrape(_: _NoParameters) -> Response:
        """Export metrics for Prometheus."""
        if metrics is None or missing is not None:
            raise missing or UnsupportedOperationError("there are no metrics")
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return Response(
            generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )


def _release(orchestrator: AsyncOrchestrator, tags: Collection[str] | None) -> Call[EngineReport]:
    if tags is None:
        return orchestrator.sleep(1)
    policies = orchestrator.orchestrator.config.tag_policies
    known = set(orchestrator.state().memory.tags)
    if not orchestrator.capabilities.owns_allocations:
        known |= set(policies)
    named = check_tags(tags, known, "release")
    if all(policies.of(tag).expendable for tag in named):
        return orchestrator.release(named)
    # A release would drop contents: these tags sleep as level 1 has it, the others stay.
    keep = dict.fromkeys(known - named, TagPolicy(Policy.KEEP, Policy.KEEP))
    return orchestrator.sleep(1, policies=Policies({**policies.declared, **keep}))


def _plan(orchestrator: AsyncOrchestrator, query: PlanQuery) -> Plan:
    if query.operation == "sleep":
        if query.tags is not None:
            raise RequestError("a sleep takes no tags", hint="give a level", operation="plan")
        return orchestrator.plan_sleep(1 if query.level is None else query.level)
    if query.level is not None:
        raise RequestError(
            f"a {query.operation} takes no level", hint="give tags", operation="plan"
        )
    tags = wanted(query.tags)
    if query.operation == "wake_up":
        return orchestrator.plan_wake(tags)
    return orchestrator.plan_release() if tags is None else orchestrator.plan_release(tags)
