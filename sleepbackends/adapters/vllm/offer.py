"""The names under which vLLM's list of sleep-mode backends has ours."""

from __future__ import annotations

import logging
from collections.abc import Iterable

logger = logging.getLogger("vllm.sleepbackends")

_CLASS = ("sleepbackends.adapters.vllm.sleep_backend", "SleepBackend")


def offer(names: Iterable[str]) -> None:
    """Register names of ours with vLLM; those that are registered stay.

    Raises
    ------
    ImportError, AttributeError
        If this vLLM has no such list.
    """
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    for name in names:
        try:
            SleepModeBackendFactory.register_backend(name, *_CLASS)
        except ValueError as error:  # registered by an earlier call
            logger.debug("%s", error)
