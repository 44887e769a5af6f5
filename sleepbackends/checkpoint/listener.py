"""The socket through which other processes of the user ask a helper for a resume.

Only its owner may connect to the file, and whoever does is asked for its user by the kernel. A
message is one line; what is not a request ends the connection with a reply that says so.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from sleepbackends.checkpoint.messages import FROM_OTHERS, LINE_BYTES, Reply, Request

_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 16


class Connection:
    """One that asks."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.received = b""


class Listener:
    """Listens, and answers through ``answer``.

    Parameters
    ----------
    path : Path
        Where the socket is; what lies there is replaced.
    selector : selectors.BaseSelector
        Where connections are watched; their ``data`` is a callable to run when they are ready.
    answer : callable
        Does what a request asks for.

    Raises
    ------
    OSError
        If the socket cannot be made.
    """

    def __init__(
        self, path: Path, selector: selectors.BaseSelector, answer: Callable[[Request], Reply]
    ) -> None:
        self._path = path
        self._selector = selector
        self._answer = answer
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            self._socket.bind(os.fspath(path))
        finally:
            os.umask(mask)
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        self._inode = path.stat().st_ino
        selector.register(self._socket, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Stop listening, and take the socket away unless another helper has replaced it."""
        self._selector.unregister(self._socket)
        self._socket.close()
        with suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _accept(self) -> None:
        try:
            connected, _ = self._socket.accept()
        except OSError:
            return  # gone again
        connected.setblocking(False)
        if peer_user(connected) not in (os.getuid(), 0):
            connected.close()
            return
        connection = Connection(connected)
        self._selector.register(connected, selectors.EVENT_READ, lambda: self._read(connection))

    def _read(self, connection: Connection) -> None:
        try:
            received = connection.socket.recv(LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        connection.received += received
        line, end, rest = connection.received.partition(b"\n")
        if not received or (not end and len(line) < LINE_BYTES):
            if not received:
                self._drop(connection)
            return
        connection.received = rest
        reply = self._answer_line(line if end else b"")
        with suppress(OSError):
            connection.socket.setblocking(True)
            connection.socket.settimeout(1.0)
            connection.socket.sendall(reply.model_dump_json().encode() + b"\n")
            connection.socket.setblocking(False)
        if reply.kind == "garbage" or rest:
            self._drop(connection)

    def _answer_line(self, line: bytes) -> Reply:
        try:
            request = Request.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]["msg"]
            return Reply(id=0, ok=False, kind="garbage", error=f"not a request: {first}")
        if request.op not in FROM_OTHERS:
            return Reply(
                id=request.id,
                ok=False,
                kind="refused",
                error=f"{request.op} is not done for other processes",
                hint=f"ask for one of {', '.join(sorted(FROM_OTHERS))}",
            )
        return self._answer(request)

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()


def peer_user(connected: socket.socket) -> int:
    """Return the user of the process at the other end, as the kernel knows it."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return int(user)
