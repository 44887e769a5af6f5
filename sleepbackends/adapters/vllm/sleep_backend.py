"""The class that vLLM creates for each of our names at its first sleep or wake-up."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, Literal

from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackend

from sleepbackends.adapters.vllm.allocator import installed

logger = logging.getLogger("vllm.sleepbackends")


class SleepBackend(SleepModeBackend):  # type: ignore[misc, unused-ignore]
    """vLLM's verbs over the memory of this process's worker.

    Where that is vLLM's own, because ours could not be used, so is what is done.
    """

    def __init__(self) -> None:
        super().__init__()
        self._allocator = installed()
        self._vllm_s: Any = None
        if self._allocator is None:
            logger.warning("sleepbackends does not own this worker's memory: vLLM's cumem is used")
            self._vllm_s = CuMemBackend()

    def suspend(self, level: int = 1) -> None:
        """Release memory by our configuration's policies.

        Raises
        ------
        SleepBackendsError
            As ``Memory.sleep``.
        """
        if self._allocator is None:
            self._vllm_s.suspend(level)
        else:
            self._allocator.memory.sleep(level)

    def resume(self, tags: Collection[str] | None = None) -> None:
        """Take memory again; see ``Memory.wake_up``.

        Raises
        ------
        SleepBackendsError
            Everything is still asleep, and the call can be repeated.
        """
        if self._allocator is None:
            self._vllm_s.resume(tags)
            return
        memory, order = self._allocator.memory, self._allocator.wake_order
        if order is not None:
            order.check(memory.waking(tags))
        memory.wake_up(tags)
        if order is not None:
            order.settle()

    def discard(self, tags: Collection[str]) -> None:
        """Release the named tags and forget their contents, by whatever the backend can do.

        Raises
        ------
        SleepBackendsError
            As ``Memory.release``.
        """
        if self._allocator is None:
            self._vllm_s.discard(tags)
        else:
            self._allocator.memory.release(tags)

    def state(self) -> Literal["RUNNING", "SUSPENDED", "RESUMING"]:
        """Tell whether anything is asleep."""
        if self._allocator is None:
            state: Literal["RUNNING", "SUSPENDED", "RESUMING"] = self._vllm_s.state()
            return state
        asleep = self._allocator.memory.orchestrator.backend.state().asleep_tags()
        return "SUSPENDED" if asleep else "RUNNING"

    @classmethod
    def preserves_communicators(cls) -> bool:
        """Tell whether communicators survive a suspend."""
        return _has("preserves_communicators")

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Tell whether compiled kernels survive."""
        return _has("preserves_compiled_artifacts")

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """Tell whether graphs with collectives replay after a resume."""
        return _has("preserves_graphs_with_communicators")

    @classmethod
    def supports_durable_storage(cls) -> bool:
        """Tell whether what is kept survives the process."""
        return _has("supports_durable_storage")


def _has(flag: str) -> bool:
    allocator = installed()
    if allocator is None:
        return bool(getattr(CuMemBackend, flag)())
    return bool(getattr(allocator.memory.orchestrator.capabilities, flag))
