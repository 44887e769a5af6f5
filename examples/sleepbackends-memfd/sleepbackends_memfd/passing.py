"""What goes over the socket: a list of what there is, then the files themselves."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from sleepbackends import StorageError

from sleepbackends_memfd.sealed import SealedFile

_HEAD_BYTES = 8
_MOST_LIST_BYTES = 64 << 20
_FILES_AT_ONCE = 200
"""The kernel passes at most 253 at once."""


def send(connection: socket.socket, files: Mapping[str, Sequence[SealedFile]]) -> None:
    """Send files by tag; they stay open here.

    Raises
    ------
    StorageError
        If the other side does not take them.
    """
    listed = {
        tag: [[each.size_bytes, each.digest.hex()] for each in of_tag]
        for tag, of_tag in files.items()
    }
    text = json.dumps(listed).encode()
    fds = [each.fd for of_tag in files.values() for each in of_tag]
    try:
        connection.sendall(len(text).to_bytes(_HEAD_BYTES, "little") + text)
        for start in range(0, len(fds), _FILES_AT_ONCE):
            socket.send_fds(connection, [b"\0"], fds[start : start + _FILES_AT_ONCE])
    except OSError as error:
        raise StorageError(
            f"the other side does not take what is handed over: {error.strerror}",
            hint="call take_over() there, and hand over again",
        ) from error


def receive(connection: socket.socket) -> dict[str, list[SealedFile]]:
    """Receive files by tag.

    Raises
    ------
    StorageError
        If what comes is not what ``send`` sends; nothing is left open.
    """
    fds: list[int] = []
    try:
        size = int.from_bytes(_exactly(connection, _HEAD_BYTES), "little")
        if size > _MOST_LIST_BYTES:
            raise _garbled(f"a list of {size} bytes")
        listed = _checked(json.loads(_exactly(connection, size)))
        count = sum(map(len, listed.values()))
        while len(fds) < count:
            _, more, _, _ = socket.recv_fds(connection, 1, min(_FILES_AT_ONCE, count - len(fds)))
            if not more:
                raise _garbled(f"{len(fds)} of {count} files came")
            fds += more
        left = iter(fds)
        files = {
            tag: [SealedFile(next(left), size, digest) for size, digest in of_tag]
            for tag, of_tag in listed.items()
        }
    except (OSError, ValueError) as error:
        _close(fds)
        raise _garbled(str(error)) from error
    except StorageError:
        _close(fds)
        raise
    return files


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _exactly(connection: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        more = connection.recv(size_bytes - len(data))
        if not more:
            raise _garbled("the connection was closed")
        data += more
    return bytes(data)


def _checked(listed: Any) -> dict[str, list[tuple[int, bytes]]]:
    try:
        return {
            str(tag): [(int(size), bytes.fromhex(digest)) for size, digest in of_tag]
            for tag, of_tag in listed.items()
        }
    except (AttributeError, TypeError) as error:
        raise _garbled(f"a list that cannot be read: {error}") from error


def _garbled(what: str) -> StorageError:
    return StorageError(
        f"what was handed over cannot be taken: {what}",
        hint="hand over again, from a backend of the same version",
    )
