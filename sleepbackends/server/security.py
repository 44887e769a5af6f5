"""Who may call a server that runs alone: the token, and what a browser is told to do."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sleepbackends.config import TOKEN_VARIABLE
from sleepbackends.errors import ConfigurationError
from sleepbackends.server.failures import refused

_SHORTEST = 16
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def read_token(path: Path | None = None) -> str | None:
    """Read the token from a file, or from ``SLEEPBACKENDS_SERVER_TOKEN``; None without either.

    Raises
    ------
    ConfigurationError
        The file cannot be read, or the token cannot be sent or could be guessed.
    """
    if path is None:
        where, token = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE)
        if token is None:
            return None
    else:
        where = str(path)
        try:
            token = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"the token file {path} cannot be read: {error}", hint="name another file"
            ) from error
    return check_token(token.strip(), where)


def check_token(token: str, where: str = "the token") -> str:
    """Return the token, or raise.

    Raises
    ------
    ConfigurationError
        It is too short, or has characters that a header does not carry.
    """
    if len(token) < _SHORTEST or not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigurationError(
            f"{where} holds no usable token: {_SHORTEST} or more printable ASCII characters "
            "without spaces are needed",
            hint="make one with: openssl rand -hex 32",
        )
    return token


def is_loopback(host: str) -> bool:
    """Tell whether a name or address is this machine's own, without asking anybody."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Lets through who may call; refuses everybody else before a route is looked for.

    Without a token only requests to a loopback name are let through, so that a name that
    somebody else points at this machine (DNS rebinding) does not reach it from a browser.

    Parameters
    ----------
    app : ASGI application
        What is guarded.
    token : str, optional
        The bearer token that requests must carry.
    open_paths : iterable of str
        What may be read without the token: pages that hold nothing.
    """

    def __init__(
        self, app: ASGIApp, *, token: str | None = None, open_paths: Iterable[str] = ()
    ) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        why = self._why_not(scope) if scope["type"] == "http" else (403, "no websockets here", "")
        if why is None:
            await self._app(scope, receive, send)
            return
        status_code, message, hint = why
        headers = {"WWW-Authenticate": "Bearer"} if status_code == 401 else {}
        await refused(status_code, message, hint, **headers)(scope, receive, send)

    def _why_not(self, scope: Scope) -> tuple[int, str, str] | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        origin = headers.get("origin")
        # A browser always names the page that makes it post; other clients name none.
        foreign = origin is not None and origin.partition("://")[2] != host
        if foreign and scope["method"] not in _SAFE_METHODS:
            return 403, f"a page of {origin} may not post here", "call from this origin"
        if self._token is None:
            if not is_loopback(_name_of(host)):
                return (
                    403,
                    f"without a token this server answers to loopback names, not to {host!r}",
                    "call it as localhost, or serve with a token",
                )
            return None
        if scope["method"] in _SAFE_METHODS and scope["path"] in self._open_paths:
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not given:
            return 401, "a bearer token is needed", "send the header Authorization: Bearer TOKEN"
        if not hmac.compare_digest(given.strip().encode(), self._token):
            return 403, "the bearer token is wrong", "send the token that the server was given"
        return None


def _name_of(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
