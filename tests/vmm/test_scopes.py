from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sleepbackends import BusyError
from sleepbackends.control import Control
from sleepbackends.vmm.scopes import Scopes


def test_a_transition_waits_for_scopes_of_other_threads() -> None:
    scopes, inside, leave = Scopes(), threading.Event(), threading.Event()

    def region() -> None:
        with scopes.open():
            inside.set()
            assert leave.wait(30)
            with scopes.open():  # nested: waiting here would never end
                pass

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(region)
        assert inside.wait(30)
        with (
            pytest.raises(BusyError, match="another thread") as caught,
            scopes.none("suspend", Control(timeout_s=0.05)),
        ):
            raise AssertionError("a transition began while a region was open")
        assert caught.value.holders
        timer = threading.Timer(0.05, leave.set)
        timer.start()
        with scopes.none("suspend", Control(timeout_s=30)):
            assert running.done() or running.result(30) is None


def test_a_scope_waits_for_the_end_of_a_transition() -> None:
    scopes, opened = Scopes(), threading.Event()

    def region() -> None:
        with scopes.open():
            opened.set()

    with ThreadPoolExecutor(1) as pool:
        with scopes.none("suspend", Control()):
            running = pool.submit(region)
            assert not opened.wait(0.05)
        running.result(30)
    assert opened.is_set()


def test_ones_own_scope_is_refused_at_once_and_leaves_nothing_behind() -> None:
    scopes = Scopes()
    with (
        scopes.open(),
        pytest.raises(BusyError, match="this thread"),
        scopes.none("discard", Control()),
    ):
        raise AssertionError("a transition began inside a region")
    with scopes.none("discard", Control(timeout_s=1)):
        pass
    with scopes.open():
        pass
