"""An application of its own around the routes."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request
from starlette.responses import Response

from sleepbackends.aio import AsyncOrchestrator
from sleepbackends.metrics import Metrics
from sleepbackends.orchestrator import Orchestrator
from sleepbackends.server.events import Feed
from sleepbackends.server.failures import refused
from sleepbackends.server.page import page
from sleepbackends.server.routes import as_async, make_routes
from sleepbackends.server.security import Guard, check_token


def app(
    orchestrator: Orchestrator | AsyncOrchestrator,
    *,
    token: str | None = None,
    docs: bool = False,
    metrics: Metrics | None = None,
    engine: str = "0",
) -> FastAPI:
    """Make an application that serves the routes of one engine, and a page that shows it.

    Parameters
    ----------
    orchestrator : Orchestrator or AsyncOrchestrator
        What does the work. It is not closed.
    token : str, optional
        The bearer token that requests must carry. Without one only requests to a loopback
        name are answered.
    docs : bool
        Whether to serve ``/docs``, whose page loads scripts from elsewhere. The document
        itself, ``/openapi.json``, is always there.
    metrics, engine
        As in ``router``.

    Raises
    ------
    ConfigurationError
        The token is too short, or has characters that a header does not carry.
    """
    if token is not None:
        check_token(token)
    application = FastAPI(
        title="sleepbackends",
        summary="Give engine memory back by tag and take it again.",
        docs_url="/docs" if docs else None,
        redoc_url=None,
        exception_handlers={StarletteHTTPException: _refuse},
    )
    asynchronous = as_async(orchestrator)
    application.state.feed = feed = Feed(asynchronous.orchestrator)
    application.include_router(make_routes(asynchronous, feed, metrics, engine))
    status_page = page()

    @application.get("/", include_in_schema=False)
    async def show_page() -> Response:
        return status_page

    # The page holds nothing, and is where a browser asks for the token.
    application.add_middleware(Guard, token=token, open_paths=["/"])
    return application


async def _refuse(request: Request, error: Exception) -> Response:
    status_code = error.status_code if isinstance(error, StarletteHTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, StarletteHTTPException) else {}
    return refused(
        status_code,
        f"{request.method} {request.url.path}: {getattr(error, 'detail', error)}",
        "GET /openapi.json lists the routes",
        **headers,
    )
