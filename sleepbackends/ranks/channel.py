"""Messages between two processes over a gloo group, which nobody has to wait for."""

from __future__ import annotations

import pickle
import queue
import re
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_END = object()


class Channel:
    """Both directions between this process and one other.

    Gloo's ``send`` waits until the other side receives, and a ``recv`` that times out closes
    every connection of the group. So each direction has a thread, and there is no timeout:
    whoever waits for an answer has a deadline of its own, and a process that ended is told by
    its connection.

    Parameters
    ----------
    group : ProcessGroup
        A gloo group that is used for nothing else, with a timeout that never passes.
    peer : int
        The global rank of the other process.
    on_message : callable
        Called with each message, from the thread that receives. Must be quick.
    on_end : callable
        Called once when no more messages will come: with None if the other side said so, else
        with the reason.
    """

    def __init__(
        self,
        group: ProcessGroup,
        peer: int,
        on_message: Callable[[Any], None],
        on_end: Callable[[str | None], None],
    ) -> None:
        self._group = group
        self._peer = peer
        self._on_message = on_message
        self._on_end = on_end
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Daemons: a process that hangs must not keep this one from ending.
        self._threads = [
            threading.Thread(target=work, name=f"sleepbackends-channel-{peer}", daemon=True)
            for work in (self._send_all, self._receive_all)
        ]

    def start(self) -> None:
        """Begin to send and to receive; the callbacks may need what holds this channel."""
        for thread in self._threads:
            thread.start()

    def send(self, message: Any) -> None:
        """Queue a message that can be pickled."""
        self._outbox.put(pickle.dumps(message))

    def end(self) -> None:
        """Send what is queued, and tell the other side that nothing follows. Never waits."""
        self._outbox.put(_END)

    def join(self, timeout_s: float) -> None:
        """Wait until both sides have ended; then the group may be destroyed."""
        give_up = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))

    def _send_all(self) -> None:
        while True:
            message = self._outbox.get()
            try:
                self._send(b"" if message is _END else message)
            except (RuntimeError, ValueError):
                return  # the thread that receives tells of it
            if message is _END:
                return

    def _receive_all(self) -> None:
        reason = None
        try:
            while data := self._receive():
                self._on_message(pickle.loads(data))  # noqa: S301 - from the engine's own group
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody can be heard any more
            # Without the place in gloo's source, and the advice that follows.
            reason = re.sub(r"^\[[^\]]*\] ", "", str(error)).partition(". ")[0]
        self.end()
        self._on_end(reason)

    def _send(self, data: bytes) -> None:
        import torch
        from torch import distributed

        distributed.send(torch.tensor([len(data)]), self._peer, group=self._group)
        if data:
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            distributed.send(payload, self._peer, group=self._group)

    def _receive(self) -> bytes:
        import torch

        size = self._received(torch.zeros(1, dtype=torch.int64))
        if not int(size):
            return b""
        return self._received(torch.zeros(int(size), dtype=torch.uint8)).numpy().tobytes()

    def _received(self, into: torch.Tensor) -> torch.Tensor:
        from torch import distributed

        distributed.recv(into, self._peer, group=self._group)
        return into
