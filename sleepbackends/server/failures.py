"""How an error becomes a reply: one body for all of them, and the status code of each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sleepbackends.errors import (
    BusyError,
    ClosedError,
    NoRoomError,
    PolicyConflictError,
    RankLostError,
    RequestError,
    SleepBackendsError,
    SuspendedError,
    TransitionCancelledError,
    TransitionTimeoutError,
    UnsupportedOperationError,
)
from sleepbackends.reports import TransitionReport
from sleepbackends.server.models import TagReply

logger = logging.getLogger(__name__)

# The first that fits: a PolicyConflictError is a RequestError too.
_STATUS: tuple[tuple[type[SleepBackendsError], int], ...] = (
    (PolicyConflictError, 409),
    (BusyError, 409),
    (SuspendedError, 409),
    (RequestError, 422),
    (UnsupportedOperationError, 501),
    (ClosedError, 503),
    (TransitionCancelledError, 503),
    (RankLostError, 503),
    (TransitionTimeoutError, 504),
    (NoRoomError, 507),
)


def _encodable(text: str) -> str:
    """Spell out what UTF-8 cannot carry: JSON can name half a character as a tag."""
    return text.encode(errors="backslashreplace").decode()


_Text = Annotated[str, AfterValidator(_encodable)]


class FailureReportReply(BaseModel):
    """Where everything is after a transition failed."""

    operation: str
    changed: bool
    copied_bytes: int
    seconds: float
    tags: dict[str, TagReply]


class ErrorReply(BaseModel):
    """The body of every reply that is not a success."""

    error: str = Field(description="The class of the error.")
    message: _Text
    hint: _Text = Field(default="", description="What to do next.")
    operation: str | None = None
    tags: list[_Text] = []
    report: FailureReportReply | None = Field(
        default=None, description="Where everything is, if the transition had begun."
    )
    holders: list[_Text] = Field(default=[], description="Of a conflict: who is in the way.")
    needed_bytes: int | None = Field(default=None, description="Where there is no room.")
    available_bytes: int | None = Field(default=None, description="Where there is no room.")

    @classmethod
    def of(cls, error: SleepBackendsError) -> ErrorReply:
        """Convert an error of this package."""
        room = error if isinstance(error, NoRoomError) else None
        return cls(
            error=type(error).__name__,
            message=error.message,
            hint=error.hint,
            operation=error.operation,
            tags=sorted(error.tags),
            report=_report(error.report),
            holders=list(error.holders) if isinstance(error, BusyError) else [],
            needed_bytes=room.needed_bytes if room else None,
            available_bytes=room.available_bytes if room else None,
        )


_MEANINGS = {
    409: "Somebody, or a policy, is in the way; nothing changed, and the holders are named.",
    422: "A parameter, a tag or a level is wrong or unknown; nothing changed.",
    501: "The backend lacks the ability; nothing changed.",
    503: "The engine is shutting down, a rank has gone, or the call was cancelled.",
    504: "The deadline passed; rolled back as the report says.",
    507: "There is no room; everything is as before the call.",
    500: "Anything else; the report says where everything is.",
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorReply, "description": meaning} for code, meaning in _MEANINGS.items()
}
"""What the OpenAPI document says of errors."""


def status_of(error: SleepBackendsError) -> int:
    """Return the status code of an error."""
    return next((code for kind, code in _STATUS if isinstance(error, kind)), 500)


def failure(status_code: int, body: ErrorReply, **headers: str) -> Response:
    """Make a reply of an error."""
    return JSONResponse(body.model_dump(mode="json"), status_code, headers=headers)


def refused(status_code: int, message: str, hint: str, **headers: str) -> Response:
    """Make a reply of a request that never came to a route."""
    return failure(
        status_code, ErrorReply(error="RequestRefused", message=message, hint=hint), **headers
    )


class Route(APIRoute):
    """A route whose errors are ``ErrorReply`` in whatever application it is mounted."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler with its errors turned into replies."""
        handle = super().get_route_handler()

        async def reply(request: Request) -> Response:
            try:
                return await handle(request)
            except SleepBackendsError as error:
                return failure(status_of(error), ErrorReply.of(error))
            except RequestValidationError as error:
                return failure(422, _invalid(error))
            except HTTPException as error:
                # A body that cannot be decoded is wrong in the same way as any other.
                status_code = 422 if error.status_code == 400 else error.status_code
                return refused(status_code, str(error.detail), "see the OpenAPI document")
            except Exception as error:
                logger.exception("%s %s failed", request.method, request.url.path)
                return failure(500, ErrorReply(error=type(error).__name__, message=str(error)))

        return reply


def _report(report: object) -> FailureReportReply | None:
    if not isinstance(report, TransitionReport):
        return None
    return FailureReportReply(
        operation=report.operation,
        changed=report.changed,
        copied_bytes=report.copied_bytes,
        seconds=report.seconds,
        tags=TagReply.after(report.tags),
    )


def _invalid(error: RequestValidationError) -> ErrorReply:
    found = "; ".join(
        f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
    )
    return ErrorReply(
        error="RequestError",
        message=found,
        hint="the OpenAPI document lists what each route takes; a body is JSON with the header "
        "Content-Type: application/json",
    )
