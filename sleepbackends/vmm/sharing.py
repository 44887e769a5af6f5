"""Moving saved bytes to shared files, in the background.

Hashing, writing and comparing go on beside everything else. Only to choose a chunk and to
change its place is the backend's transition lock held. A chunk that was overwritten, dropped or
looked at by a user meanwhile stays where it is.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from sleepbackends.errors import ClosedError, SleepBackendsError
from sleepbackends.vmm.copies import Copies
from sleepbackends.vmm.driver import Driver
from sleepbackends.vmm.host_copy import Chunk, HostCopy
from sleepbackends.vmm.places import Slot
from sleepbackends.vmm.segment import Range
from sleepbackends.vmm.shared_arena import SharedArena, is_shared

logger = logging.getLogger(__name__)


class Sharing:
    """The thread of one backend that shares what was saved.

    Parameters
    ----------
    driver : Driver
        Pins what is shared.
    arena : SharedArena
        Where bytes are saved and shared.
    copies : Copies
        What was saved.
    hold : callable
        Gives a scope in which no transition takes place.
    """

    def __init__(
        self,
        driver: Driver,
        arena: SharedArena,
        copies: Copies,
        hold: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._driver = driver
        self._arena = arena
        self._copies = copies
        self._hold = hold
        self._wanted = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def wake(self) -> None:
        """Look for chunks that are not shared yet, soon."""
        with self._starting:
            if self._stopped.is_set():
                return
            self._wanted.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="sleepbackends-share", daemon=True
                )
                # At exit the thread must have left the driver before the driver goes.
                atexit.register(self.stop)
                self._thread.start()

    def stop(self) -> None:
        """End the thread, once it is done with its chunk; repeating the call does nothing."""
        # A staging that ends meanwhile may be about to start the thread.
        with self._starting:
            self._stopped.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.stop)

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._stopped.is_set():
                return
            try:
                with self._driver.aside():
                    self._share_all()
            except ClosedError:
                return
            except SleepBackendsError:
                logger.exception("sharing saved bytes failed; they stay where they are")

    def _share_all(self) -> None:
        with self._hold():
            parts = [(copy, chunk) for copy in self._copies.all() for chunk in copy.chunks]
        for copy, chunk in parts:
            if self._stopped.is_set():
                return
            self._share(copy, chunk)

    def _share(self, copy: HostCopy, chunk: Chunk) -> None:
        with self._hold():
            saved, fingerprint, writes = chunk.saved, chunk.fingerprint, chunk.writes
            if fingerprint is None or is_shared(saved) or not self._copies.holds(copy):
                return
            if not isinstance(saved, Range):
                return
            kept = saved.view(0, saved.size_bytes)
        with kept:  # keeps the memory there, not what it holds
            shared = self._arena.share(saved, fingerprint)
        if shared is None:
            return
        with self._hold():
            same = chunk.saved is saved and chunk.writes == writes and self._copies.holds(copy)
            # What a user looks at has to stay for as long as the tag is asleep.
            if same and not saved.segment.views:
                self._copies.move(copy, chunk, shared)
            else:
                self._arena.give_back(Slot([shared]))
        if saved.segment.is_empty:
            self._arena.trim()
