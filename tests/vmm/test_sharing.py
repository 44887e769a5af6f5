"""The thread that shares saved bytes starts and stops, whatever happens meanwhile."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from sleepbackends.vmm.sharing import Sharing


class NothingSaved:
    def all(self) -> list[Any]:
        return []


class NoDriver:
    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()


def make() -> Sharing:
    driver: Any = NoDriver()
    anything: Any = NothingSaved()
    return Sharing(driver, anything, anything, nullcontext)


def test_it_can_be_stopped_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A staging wakes it at its end, which may be while the backend is closed."""
    sharing, real = make(), threading.Thread.start
    stopping: list[Future[None]] = []

    with ThreadPoolExecutor(1) as pool:

        def start(thread: threading.Thread) -> None:
            if thread.name == "sleepbackends-share":
                stopping.append(pool.submit(sharing.stop))
                time.sleep(0.05)
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        sharing.wake()
        stopping[0].result(30)
    assert "sleepbackends-share" not in {thread.name for thread in threading.enumerate()}


def test_once_stopped_it_stays_so() -> None:
    sharing = make()
    sharing.stop()
    sharing.wake()
    sharing.stop()
    assert "sleepbackends-share" not in {thread.name for thread in threading.enumerate()}
