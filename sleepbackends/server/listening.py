"""Where a server that runs alone listens, and its run from start to stop."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from sleepbackends.config import TOKEN_VARIABLE
from sleepbackends.errors import ConfigurationError, RequestError
from sleepbackends.server.security import is_loopback
from sleepbackends.termination import terminated_like_interrupted

_GRACE_S = 5


@contextmanager
def bound_address(host: str, port: int, *, has_token: bool) -> Iterator[socket.socket]:
    """Bind a TCP socket, which does not listen yet, and close it at the end.

    Parameters
    ----------
    host : str
        A name or address; of a name the first address is used.
    port : int
        0 lets the system choose.
    has_token : bool
        Whether requests need a token. Without one only loopback addresses are bound.

    Raises
    ------
    ConfigurationError
        Others could reach the address and no token is needed; nothing was bound.
    RequestError
        The address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise RequestError(
            f"{host} has no address: {error}", hint="name another host", operation="serve"
        ) from error
    if not has_token and not is_loopback(str(address[0])):
        raise ConfigurationError(
            f"{host} can be reached from elsewhere and no token is set",
            hint=f"set {TOKEN_VARIABLE}, or name a file with --token-file; or listen on 127.0.0.1 "
            "or on a unix socket",
            operation="serve",
        )
    with socket.socket(family, kind, protocol) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(bound, address, f"{host} port {port}")
        yield bound


@contextmanager
def bound_path(path: Path) -> Iterator[socket.socket]:
    """Bind a unix socket for this user alone, and remove its file at the end.

    A file that a server left behind is replaced.

    Raises
    ------
    RequestError
        Somebody listens there, or something else is there; it was left alone.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        _remove_stale(path)
        _bind(bound, str(path), str(path))
        try:
            # Nobody can connect before it listens, which it does not do yet.
            path.chmod(0o600)
            yield bound
        finally:
            path.unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """Ends the streams of events when it stops: it would wait for them in vain."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.feed.end()  # type: ignore[union-attr]
        await super().shutdown(sockets)


def run(application: FastAPI, bound: socket.socket) -> None:
    """Serve on a bound socket until the process is interrupted or terminated.

    Requests that are going on then have a few seconds to end. A transition that is cancelled
    so is rolled back, or completes.

    Parameters
    ----------
    application : FastAPI
        What is served; made by ``app``.
    bound : socket
        From ``bound_address`` or ``bound_path``.
    """
    server = _Server(
        uvicorn.Config(
            application,
            loop="asyncio",  # the one that listens on a unix socket it did not make
            lifespan="off",
            log_level="warning",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
    # What comes after the server runs after SIGTERM too, which uvicorn raises again.
    with terminated_like_interrupted(), suppress(KeyboardInterrupt):
        server.run(sockets=[bound])


def _bind(bound: socket.socket, address: object, where: str) -> None:
    try:
        bound.bind(address)  # type: ignore[arg-type]
    except OSError as error:
        raise RequestError(
            f"cannot listen on {where}: {error.strerror or error}",
            hint="choose another, or stop what listens there",
            operation="serve",
        ) from error


def _remove_stale(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if stat.S_ISSOCK(mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
                return
            except OSError:
                pass
    raise RequestError(
        f"cannot listen on {path}: it is in use, or not a socket",
        hint="choose another path, or stop what listens there",
        operation="serve",
    )
