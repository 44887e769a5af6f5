"""What stands in the place of vLLM's allocator: its surface, over our memory."""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

from sleepbackends.adapters.vllm.memory import Memory
from sleepbackends.adapters.vllm.wake_order import WakeOrder

_MODULE = "vllm.device_allocator.cumem"
_UNNAMED = "default"


class Allocator:
    """All that vLLM, and code written for vLLM's allocator, calls on it.

    Parameters
    ----------
    memory : Memory
        Where it comes from.
    wake_order : WakeOrder, optional
        What a wake-up that vLLM's worker asks for has to mind.
    """

    def __init__(self, memory: Memory, wake_order: WakeOrder | None = None) -> None:
        self.memory = memory
        self.wake_order = wake_order

    def use_memory_pool(self, tag: str | None = None) -> AbstractContextManager[Any]:
        """Let what torch allocates in this thread carry the tag, until the scope ends."""
        return self.memory.region(_UNNAMED if tag is None else tag)

    def cudagraph_pool(self) -> AbstractContextManager[tuple[int, int]]:
        """Give the pool for captured graphs; see ``Memory.graph_pool``."""
        return self.memory.graph_pool()

    def sleep(self, offload_tags: Collection[str] | str | None = None) -> None:
        """Keep the contents of the named tags, drop all others, release the memory of both.

        Raises
        ------
        SleepBackendsError
            As ``Memory.sleep_keeping``.
        """
        self.memory.sleep_keeping(_tags(_UNNAMED if offload_tags is None else offload_tags))

    def discard(self, tags: Collection[str] | str) -> None:
        """Release the named tags and forget their contents.

        Raises
        ------
        SleepBackendsError
            As ``Memory.release``.
        """
        self.memory.release(_tags(tags))

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take memory again; see ``Memory.wake_up``.

        Raises
        ------
        SleepBackendsError
            Everything is still asleep, and the call can be repeated.
        """
        self.memory.wake_up(tags)

    def get_current_usage(self) -> int:
        """Return the bytes that are allocated under all tags, asleep or not."""
        return self.memory.usage_bytes

    def release_pools(self) -> None:
        """Be shut down: give pinned memory back, and the place to vLLM's own for other engines.

        What is mapped stays usable. Repeating the call does nothing.
        """
        self.memory.close()
        if installed() is self:
            sys.modules[_MODULE].CuMemAllocator.instance = None

    close = release_pools


def installed() -> Allocator | None:
    """Return the allocator of this process's worker, if it is ours."""
    module = sys.modules.get(_MODULE)
    instance: object = module.CuMemAllocator.instance if module is not None else None
    return instance if isinstance(instance, Allocator) else None


def _tags(tags: Collection[str] | str) -> Collection[str]:
    return (tags,) if isinstance(tags, str) else tags
