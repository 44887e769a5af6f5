"""Waiting for what happens in the background."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

PATIENCE_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, and fail if it does not come to that."""
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, "it did not come to that"
        time.sleep(0.005)


def has_ended(pid: int) -> bool:
    """Tell whether a process has ended, be it that nobody has asked how."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
