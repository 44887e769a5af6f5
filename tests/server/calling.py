"""Requests to an application without a network, one event loop for each."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from starlette.types import ASGIApp

from sleepbackends import Orchestrator
from sleepbackends.server import app

BASE = "http://localhost:8420"
TOKEN = "0123456789abcdef0123456789abcdef"  # noqa: S105 - of the tests


def client(application: ASGIApp, base_url: str = BASE) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url=base_url)


class Caller:
    """Makes requests to one application, from code that has no event loop."""

    def __init__(self, application: ASGIApp | Orchestrator) -> None:
        self.application: ASGIApp = (
            app(application) if isinstance(application, Orchestrator) else application
        )

    def __call__(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def request() -> httpx.Response:
            async with client(self.application) as http:
                return await http.request(method, path, **kwargs)

        return asyncio.run(asyncio.wait_for(request(), 30))

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self("GET", path, **kwargs)

    def post(self, path: str, **kwargs: Any) -> httpx.Response:
        return self("POST", path, **kwargs)

    def ok(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        response = self(method, path, **kwargs)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body
