"""Being told to end while there is something to undo."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Have SIGTERM raise ``KeyboardInterrupt``, so that what must not be left behind is not.

    In another thread than the main one it does nothing: signals are not handled there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
