"""What ``collective_rpc`` can call on a worker besides what vLLM gave it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

from sleepbackends.adapters.vllm.memory import Memory


def attach(worker: Any, memory: Memory) -> None:
    """Give one worker its further calls, and let its sleep take the process where ours does.

    ``sleepbackends_status()`` tells what is where; ``sleepbackends_mark_valid(tags)`` says that
    contents were loaded again; ``discard(tags)`` releases tags, where vLLM has no such call.
    Arguments and results are plain types, so that they pass between processes and over HTTP.

    Parameters
    ----------
    worker : object
        vLLM's worker.
    memory : Memory
        Its memory.
    """

    def discard(tags: Collection[str]) -> None:
        memory.release(tags)

    if memory.takes_process:
        worker.sleep = _with_process(worker.sleep, memory)
    worker.sleepbackends_status = memory.status
    worker.sleepbackends_mark_valid = memory.mark_valid
    if not hasattr(worker, "discard"):
        worker.discard = discard


def _with_process(sleep: Callable[..., Any], memory: Memory) -> Callable[..., Any]:
    @wraps(sleep)
    def sleep_with_process(level: int = 1) -> Any:
        memory.wake_process()  # asked twice: vLLM looks at the device first
        result = sleep(level)
        memory.sleep_process(level)
        return result

    return sleep_with_process
