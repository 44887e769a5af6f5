"""Requests made up from the OpenAPI document get replies that it describes."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from sleepbackends.server import app
from tests.gated import make

# A tag that is unknown, or a level where there is none, is valid to the schema alone.
SEMANTIC: list[Any] = [positive_data_acceptance]
HOST = {"Host": "localhost"}

schema = schemathesis.openapi.from_asgi("/openapi.json", app(make()[0]), headers=HOST)


@schema.exclude(path="/events").parametrize()
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_replies_are_as_described(case: schemathesis.Case[Any]) -> None:
    case.call_and_validate(headers=HOST, excluded_checks=SEMANTIC)
