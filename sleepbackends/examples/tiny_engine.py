"""An engine that serves a small model and can be put to sleep.

It uses the public interface alone: the weights and the KV cache are allocated in regions of
a backend, work on them is guarded by ``Orchestrator.use``, and the methods named like the
hooks of ``EngineHooks`` are its hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sleepbackends import (
    AllocatingBackend,
    EngineHooks,
    Orchestrator,
    RequestError,
    SleepConfig,
    SuspendedError,
    UnsupportedOperationError,
    WeightsFileError,
)
from sleepbackends.examples.model_config import read_config
from sleepbackends.examples.tiny_model import KVCache, TinyModel


class TinyEngine:
    """Serves one sequence at a time, from any thread.

    The keys and values of the last sequence stay in the KV cache, so that a prompt that
    begins like it is computed from where it differs (a prefix cache).

    Parameters
    ----------
    backend : AllocatingBackend
        Where the memory comes from. ``close()`` closes it.
    weights_path : Path
        A Llama-style safetensors file.
    kv_bytes : int
        Size of the KV cache, at most.
    config : SleepConfig, optional
        For the orchestrator.

    Attributes
    ----------
    orchestrator : Orchestrator
        Puts this engine to sleep and wakes it.
    weights : dict of str to Tensor
        In memory of the backend, tag ``weights``.
    kv_cache : KVCache
        In memory of the backend, tag ``kv_cache``.
    computed_positions : int
        How many positions went through the model so far; a prompt that is found in the
        prefix cache adds fewer.

    Raises
    ------
    UnsupportedOperationError
        If the backend does not own allocations.
    WeightsFileError
        If the file is missing or damaged, or does not hold such a model.
    RequestError
        If the KV cache would be too small for a single step.
    NoRoomError
        If there is no room.

    Notes
    -----
    Guarantee: if it raises, the backend is still the caller's, and nothing stays allocated.
    """

    def __init__(
        self,
        backend: AllocatingBackend,
        weights_path: Path,
        *,
        kv_bytes: int = 64 << 20,
        config: SleepConfig | None = None,
    ) -> None:
        if not backend.capabilities.owns_allocations:
            raise UnsupportedOperationError(
                f"backend {backend.name!r} does not own allocations, and this engine allocates "
                "by tag",
                hint="use a backend with owns_allocations",
            )
        self.weights_path = weights_path
        self.model_config = read_config(weights_path)
        with backend.region("weights") as region:
            self.weights: dict[str, Tensor] = region.from_safetensors(weights_path)
        self.kv_cache = self._make_cache(backend, kv_bytes)
        self.computed_positions = 0
        self._model = TinyModel(self.model_config, self.weights)
        self._cached_ids: list[int] = []
        self._turn = threading.Lock()
        self._aborting = threading.Event()
        self.orchestrator = Orchestrator(backend, config=config, hooks=EngineHooks.of(self))

    def generate(self, prompt_ids: Sequence[int], n: int) -> list[int]:
        """Continue a prompt with the likeliest tokens.

        Parameters
        ----------
        prompt_ids : sequence of int
            Token ids, at least one.
        n : int
            How many tokens to add.

        Returns
        -------
        list of int
            The ``n`` tokens.

        Raises
        ------
        RequestError
            If the prompt is empty or too long, or holds what is not a token.
        SuspendedError
            If the engine is asleep, or was told to abort its requests.
        """
        with self.orchestrator.use(holder="generate"), self._turn, torch.inference_mode():
            ids = self._checked(prompt_ids, n)
            # The last id is always computed alone, so that a prompt takes the same path
            # to its first token whether it is found in the cache or not.
            self._prefill(ids[:-1])
            for _ in range(n):
                if self._aborting.is_set():
                    raise SuspendedError(
                        "the request was aborted: the engine is about to sleep",
                        hint="ask again once the engine is awake",
                    )
                hidden = self._compute(ids[-1:])
                ids.append(int(self._model.logits(hidden[-1]).argmax()))
        return ids[len(prompt_ids) :]

    def embed(self, prompt_ids: Sequence[int]) -> Tensor:
        """Embed a prompt, from the weights alone: the KV cache may be asleep.

        Returns
        -------
        Tensor
            The mean of the last hidden states, shape ``(hidden_size,)``.

        Raises
        ------
        RequestError
            If the prompt is empty, or holds what is not a token.
        SuspendedError
            If the weights are not resident and valid.
        """
        use = self.orchestrator.use({"weights"}, holder="embed")
        with use, self._turn, torch.inference_mode():
            ids = self._checked(prompt_ids, 0)
            return self._model.hidden(self._as_tensor(ids)).mean(dim=0)

    def close(self) -> None:
        """Close the orchestrator and the backend, and give all memory back.

        A running request is waited for. Repeating the call does nothing.
        """
        self.orchestrator.close()
        with self._turn:
            self._cached_ids.clear()
            self.weights.clear()
            nothing = torch.empty(0, 0, 0, 0)
            self.kv_cache = KVCache(nothing, nothing)

    # Hooks

    def quiesce(self, mode: Literal["wait", "abort", "keep"], deadline_s: float | None) -> None:
        """End running requests early if asked to; otherwise they are waited for.

        ``keep`` is taken for ``wait``: this engine has no scheduler that could set a running
        request aside.
        """
        if mode == "abort":
            self._aborting.set()

    def unquiesce(self) -> None:
        """Let requests run to their end again."""
        self._aborting.clear()

    def drop_caches(self, tags: Collection[str]) -> None:
        """Forget which ids the keys and values belong to: one or the other is gone."""
        if {"weights", "kv_cache"} & set(tags):
            self._cached_ids.clear()

    def reload(self, tags: Collection[str]) -> None:
        """Fill memory that lost its contents, in place.

        Raises
        ------
        WeightsFileError
            If the file is gone or no longer holds the same tensors.
        """
        if "weights" in tags:
            self._reload_weights()
        if "kv_cache" in tags:
            self.kv_cache.keys.zero_()
            self.kv_cache.values.zero_()

    def _reload_weights(self) -> None:
        if read_config(self.weights_path) != self.model_config:
            raise WeightsFileError(
                f"weights file {str(self.weights_path)!r} holds another model than was loaded",
                hint="put the file back, then call wake_up() again",
            )
        try:
            with safe_open(self.weights_path, framework="pt") as file:
                for name, tensor in self.weights.items():
                    tensor.copy_(file.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise WeightsFileError(
                f"weights file {str(self.weights_path)!r} cannot be read: {error}",
                hint="put the file back, then call wake_up() again",
            ) from error

    # Helpers

    def _make_cache(self, backend: AllocatingBackend, kv_bytes: int) -> KVCache:
        config = self.model_config
        dtype = next(iter(self.weights.values())).dtype
        capacity = kv_bytes // config.position_bytes
        if capacity < 1:
            raise RequestError(
                f"a KV cache of {kv_bytes} bytes has no room for one position of "
                f"{config.position_bytes} bytes",
                hint="make it larger",
            )
        shape = (config.layers, config.kv_heads, capacity, config.head_dim)
        with backend.region("kv_cache") as region:
            cache = KVCache(region.empty(shape, dtype), region.empty(shape, dtype))
        # Written now, so that memory that is not there is missed here and not in a request.
        cache.keys.zero_()
        cache.values.zero_()
        return cache

    def _checked(self, prompt_ids: Sequence[int], n: int) -> list[int]:
        ids = list(prompt_ids)
        size = self.model_config.vocab_size
        if not ids or n < 0 or not all(0 <= i < size for i in ids):
            raise RequestError(
                f"a prompt of {len(ids)} ids cannot be continued by {n} tokens",
                hint=f"give at least one id, all of them from 0 to {size - 1}, and n >= 0",
            )
        if n and len(ids) + n - 1 > self.kv_cache.capacity:
            raise RequestError(
                f"{len(ids)} ids and {n} tokens do not fit into a KV cache of "
                f"{self.kv_cache.capacity} positions",
                hint="ask for less, or make the KV cache larger",
            )
        return ids

    def _prefill(self, ids: list[int]) -> None:
        found = _common_length(self._cached_ids, ids)
        del self._cached_ids[found:]
        if found < len(ids):
            self._compute(ids[found:])

    def _compute(self, ids: list[int]) -> Tensor:
        start = len(self._cached_ids)
        hidden = self._model.hidden(self._as_tensor(ids), self.kv_cache, start)
        self._cached_ids += ids
        self.computed_positions += len(ids)
        return hidden

    def _as_tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, device=self.kv_cache.keys.device)


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return sum(1 for _ in pairs)
