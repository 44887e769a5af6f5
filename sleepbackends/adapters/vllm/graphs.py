"""Memory of captured graphs, where vLLM is asked to let it sleep too.

vLLM captures into its allocator's pool only where its own backend is named; so its question is
answered here for names of ours as it would be for that one.
"""

from __future__ import annotations

import copy
import os
from typing import Any

from sleepbackends.adapters.vllm.choice import VLLM_OWN, is_ours
from sleepbackends.adapters.vllm.memory import Memory

_MARK = "_placed_by_sleepbackends"


def wanted(model_config: Any) -> bool:
    """Tell whether an engine asks for its graphs to sleep; some releases know no such option."""
    return bool(getattr(model_config, "sleep_mode_offload_cudagraph", False))


def prepare(model_config: Any) -> None:
    """Keep NCCL from pinning graph memory, as vLLM does; before any communicator is made."""
    if wanted(model_config):
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def offload(model_config: Any, memory: Memory) -> None:
    """Have graphs captured into our pool, if the engine asks for it and the backend has one."""
    if not (wanted(model_config) and memory.has_graph_pool):
        return
    from vllm.config import VllmConfig

    question = VllmConfig.use_cumem_cudagraph_pool
    if hasattr(question.fget, _MARK):
        return

    def answer(config: Any) -> bool:
        if config.model_config is not None and is_ours(config.model_config.sleep_mode_backend):
            config = copy.copy(config)
            config.model_config = copy.copy(config.model_config)
            config.model_config.sleep_mode_backend = VLLM_OWN
        return bool(question.fget(config))

    setattr(answer, _MARK, True)
    VllmConfig.use_cumem_cudagraph_pool = property(answer, doc=question.__doc__)
