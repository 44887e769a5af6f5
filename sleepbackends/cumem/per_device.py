"""What is made once for each device, when it is first asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from sleepbackends.errors import DeviceMemoryError

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """What holds something of a device."""

    def close(self) -> None:
        """Give it back; a failure is logged."""
        ...


ItemT = TypeVar("ItemT", bound=Closable)


class PerDevice(Generic[ItemT]):
    """Keeps one for each device, and that there is none where that is so.

    Parameters
    ----------
    what : str
        What they are, for the log.
    find : callable
        Makes the one of a device, or tells by None that there is none. Where it finds no room on
        the device (``DeviceMemoryError``) it is asked again another time.
    lock : RLock
        Held while one is made, and while all are closed.
    """

    def __init__(
        self, what: str, find: Callable[[int], ItemT | None], lock: threading.RLock
    ) -> None:
        self._what = what
        self._find = find
        self._lock = lock
        self._found: dict[int, ItemT | None] = {}

    def get(self, device: int) -> ItemT | None:
        """Return the one of a device; None if there is none, or no room for it now."""
        with self._lock:
            if device not in self._found:
                try:
                    self._found[device] = self._find(device)
                except DeviceMemoryError as error:
                    logger.debug("no %s on device %d now: %s", self._what, device, error.message)
                    return None
            return self._found[device]

    def close(self) -> None:
        """Close all of them, once the lanes are done."""
        with self._lock:
            found, self._found = self._found, {}
            for each in found.values():
                if each is not None:
                    each.close()
