"""Being told to end, and ending with whoever is waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from sleepbackends.termination import terminated_like_interrupted
from tests.waiting import has_ended, until

CHILD = """
import ctypes, os
from sleepbackends.termination import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
ctypes.PyDLL(None).sleep(60)  # no thread of Python's gets to run
"""

PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {CHILD!r}], check=False)
"""


def test_a_process_that_hangs_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not has_ended(child)
    parent.kill()
    until(lambda: has_ended(child))
    parent.communicate()


def test_sigterm_is_an_interrupt_for_a_while() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminated_like_interrupted():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread_nothing_changes() -> None:
    before, found = signal.getsignal(signal.SIGTERM), list[Any]()

    def run() -> None:
        with terminated_like_interrupted():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]
