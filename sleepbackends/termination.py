"""Being told to end while there is something to undo, and ending with whoever is waited for."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1


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


def end_with_parent() -> None:
    """Have this process killed once the thread that started it has gone, however that went.

    It is for processes whose result nobody would read: they would go on holding the memory of a
    device, and one that hangs for ever. On Linux the kernel does it (``PR_SET_PDEATHSIG``), so
    that a process that hangs is killed too; elsewhere nothing is done.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it went before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)
