"""The helper: a process without a context that suspends and resumes others.

``python -m sleepbackends.checkpoint.helper OWNER DIRECTORY ON_EXIT``. It says who it is on its
standard output, then answers one request a line from its standard input, and from the socket in
the directory, one at a time. When it is told to end, or the owner does, it ends.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from sleepbackends.checkpoint.listener import Listener
from sleepbackends.checkpoint.messages import LINE_BYTES, Hello, Reply, Request
from sleepbackends.checkpoint.operations import Operations
from sleepbackends.checkpoint.runtime import RuntimeDirectory
from sleepbackends.checkpoint.targets import Target
from sleepbackends.errors import SleepBackendsError


class Helper:
    """Reads requests and answers them until the owner is gone.

    Parameters
    ----------
    operations : Operations
        Does the work.
    requests : int
        The file descriptor of the requests.
    replies : BinaryIO
        Where the replies go.
    """

    def __init__(self, operations: Operations, requests: int, replies: BinaryIO) -> None:
        self._operations = operations
        self._requests = requests
        self._replies = replies
        self._received = b""
        self._owned = True
        self.told_to_end = False
        self.selector = selectors.DefaultSelector()
        self.selector.register(requests, selectors.EVENT_READ, self._read)

    def watch(self, owner: Target) -> None:
        """End as well when the owner does, even if somebody else keeps its end of the pipe."""
        with suppress(OSError, AttributeError):
            descriptor = os.pidfd_open(owner.pid)
            self.selector.register(descriptor, selectors.EVENT_READ, self._disown)

    def run(self) -> None:
        """Answer until there is no owner any more."""
        while self._owned:
            for key, _ in self.selector.select():
                ready: Callable[[], None] = key.data
                ready()

    def _disown(self) -> None:
        self._owned = False

    def _read(self) -> None:
        received = os.read(self._requests, LINE_BYTES)
        if not received:
            self._disown()
            return
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            self._answer(line)

    def _answer(self, line: bytes) -> None:
        try:
            request = Request.model_validate_json(line)
        except ValidationError as error:
            self._reply(Reply(id=0, ok=False, kind="garbage", error=str(error)))
            return
        if request.op == "end":
            self.told_to_end = True
            self._disown()
            return
        self._reply(self._operations.answer(request))

    def _reply(self, reply: Reply) -> None:
        try:
            self._replies.write(reply.model_dump_json().encode() + b"\n")
            self._replies.flush()
        except OSError:
            self._disown()


def main() -> None:
    """Run as the helper of the process that is named on the command line."""
    owner_pid, directory, on_exit = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    # What a library may write to standard output is no reply.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the owner too
    try:
        owner = Target.of(owner_pid)
        operations = Operations.elsewhere(owner, directory)
    except SleepBackendsError as error:
        hello = Hello(helper=os.getpid(), problem=error.message, hint=error.hint)
        replies.write(hello.model_dump_json().encode() + b"\n")
        replies.flush()
        return
    helper = Helper(operations, 0, replies)
    helper.watch(owner)
    socket_path = RuntimeDirectory(directory).socket_of(owner_pid)
    listener = Listener(socket_path, helper.selector, operations.answer)
    try:
        replies.write(Hello(helper=os.getpid()).model_dump_json().encode() + b"\n")
        replies.flush()
        helper.run()
        if on_exit == "resume" and not helper.told_to_end:
            operations.answer(Request(id=0, op="resume", force=True))
    finally:
        listener.close()


if __name__ == "__main__":
    main()
