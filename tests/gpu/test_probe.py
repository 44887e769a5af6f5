"""A probe leaves the process as it was: what is forked from it can use the GPU."""

from __future__ import annotations

from .helpers import run_script

FORK = """
import os
from sleepbackends.cumem.backend import CumemBackend

answer = CumemBackend.probe()
assert answer.ok, answer
worker = os.fork()
if not worker:
    import torch
    os._exit(int(torch.ones(4, device="cuda").sum()) - 4)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
"""

TOO_LATE = """
import os, torch
from sleepbackends.cumem.backend import CumemBackend

torch.ones(1, device="cuda")
assert CumemBackend.probe().ok
worker = os.fork()
if not worker:
    answer = CumemBackend.probe()
    os._exit(int(answer.ok or "spawn" not in answer.hint))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
"""


def test_a_worker_can_be_forked_after_a_probe() -> None:
    run_script(FORK)


def test_a_worker_that_was_forked_too_late_is_told() -> None:
    run_script(TOO_LATE, env={"PYTHONWARNINGS": "ignore"})
