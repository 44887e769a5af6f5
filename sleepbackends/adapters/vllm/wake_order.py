"""What vLLM does right after a wake-up that may touch weights which are still asleep.

In the releases with ``restores_buffers_on_any_wake`` it copies saved buffers back, and rebuilds
those of a draft model, whatever was woken. They are kept out of its way until the weights are
there. What cannot be kept out of the way is refused before anything changed.
"""

from __future__ import annotations

from typing import Any

from sleepbackends.adapters.vllm.memory import KV_CACHE, WEIGHTS, Memory
from sleepbackends.errors import RequestError

_BUFFERS = "_sleep_saved_buffers"
_DRAFT = "_sleep_rebuild_draft_metadata_buffers"


class WakeOrder:
    """Guards one worker's wake-ups.

    Parameters
    ----------
    worker : object
        vLLM's worker.
    memory : Memory
        Its memory.
    """

    def __init__(self, worker: Any, memory: Memory) -> None:
        self._worker = worker
        self._memory = memory
        self._buffers: dict[str, Any] = {}
        self._rebuild_draft = False

    def check(self, waking: frozenset[str]) -> None:
        """Refuse to wake the KV cache alone where vLLM would then write to the weights.

        Raises
        ------
        RequestError
            If so; nothing changed.
        """
        asleep = self._memory.orchestrator.backend.state().asleep_tags()
        if KV_CACHE in waking and WEIGHTS in asleep - waking and self._resets_scales():
            raise RequestError(
                "this vLLM resets the scales of a quantized KV cache when it wakes, and they "
                "lie among the weights, which are asleep",
                hint=f"wake {WEIGHTS!r} first, or both at once",
                operation="wake_up",
                tags=[KV_CACHE],
            )

    def settle(self) -> None:
        """Set saved buffers aside while the weights are asleep, and give them back after."""
        worker = self._worker
        if WEIGHTS in self._memory.orchestrator.backend.state().asleep_tags():
            self._buffers.update(getattr(worker, _BUFFERS, {}))
            self._rebuild_draft |= getattr(worker, _DRAFT, False)
            setattr(worker, _BUFFERS, {})
            setattr(worker, _DRAFT, False)
        elif self._buffers or self._rebuild_draft:
            setattr(worker, _BUFFERS, {**self._buffers, **getattr(worker, _BUFFERS, {})})
            setattr(worker, _DRAFT, self._rebuild_draft or getattr(worker, _DRAFT, False))
            self._buffers, self._rebuild_draft = {}, False

    def _resets_scales(self) -> bool:
        if getattr(self._worker, "use_v2_model_runner", False):
            return False
        from vllm.utils.torch_utils import is_quantized_kv_cache

        return bool(is_quantized_kv_cache(self._worker.cache_config.cache_dtype))
