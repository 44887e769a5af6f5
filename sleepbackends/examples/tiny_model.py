"""A decoder-only transformer over given weights: inference only, nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import tau

import torch
from torch import Tensor
from torch.nn import functional

from sleepbackends.examples.model_config import EMBEDDING, HEAD, NORM, ModelConfig


@dataclass(frozen=True)
class KVCache:
    """Keys and values of one sequence.

    Parameters
    ----------
    keys, values : Tensor
        Shape ``(layers, kv_heads, capacity, head_dim)``.
    """

    keys: Tensor
    values: Tensor

    @property
    def capacity(self) -> int:
        """How many positions there is room for."""
        return self.keys.shape[2]

    def extend(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store positions from ``start`` on, and return all up to their end."""
        end = start + keys.shape[1]
        self.keys[layer, :, start:end] = keys
        self.values[layer, :, start:end] = values
        return self.keys[layer, :, :end], self.values[layer, :, :end]


class TinyModel:
    """Computes hidden states and logits, as the Llama models do.

    RMSNorm, rotary embeddings, grouped-query attention and SwiGLU.

    Parameters
    ----------
    config : ModelConfig
        The sizes.
    weights : mapping of str to Tensor
        The weights by their names in ``config.shapes``; looked up at each use.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self._weights = weights

    def hidden(self, ids: Tensor, cache: KVCache | None = None, start: int = 0) -> Tensor:
        """Compute the hidden states of consecutive positions.

        Parameters
        ----------
        ids : Tensor
            Token ids, shape ``(n,)``.
        cache : KVCache, optional
            Holds the positions before ``start`` and takes these. Without it, ``ids`` is the
            whole sequence.
        start : int
            The position of the first id.

        Returns
        -------
        Tensor
            Shape ``(n, hidden_size)``.
        """
        states = functional.embedding(ids, self._weights[EMBEDDING])
        rotation = self._rotation(torch.arange(start, start + len(ids), device=ids.device))
        for layer in range(self.config.layers):
            normed = self._norm(states, f"model.layers.{layer}.input_layernorm.weight")
            states = states + self._attention(layer, normed, rotation, cache, start)
            normed = self._norm(states, f"model.layers.{layer}.post_attention_layernorm.weight")
            states = states + self._mlp(layer, normed)
        return self._norm(states, NORM)

    def logits(self, hidden: Tensor) -> Tensor:
        """Project hidden states, shape ``(..., hidden_size)``, to ``(..., vocab_size)``."""
        return functional.linear(hidden, self._weights[EMBEDDING if self.config.tied else HEAD])

    def _attention(
        self, layer: int, x: Tensor, rotation: Tensor, cache: KVCache | None, start: int
    ) -> Tensor:
        config = self.config
        queries, keys, values = (
            # (n, heads * head_dim) -> (heads, n, head_dim)
            self._linear(x, layer, f"self_attn.{which}_proj")
            .view(len(x), -1, config.head_dim)
            .transpose(0, 1)
            for which in "qkv"
        )
        queries, keys = _rotate(queries, rotation), _rotate(keys, rotation)
        if cache is not None:
            keys, values = cache.extend(layer, start, keys, values)
        group = config.heads // config.kv_heads
        mixed = functional.scaled_dot_product_attention(
            queries.view(-1, group, len(x), config.head_dim),
            # Each key serves a group of queries: seen several times, stored once.
            keys.unsqueeze(1).expand(-1, group, -1, -1),
            values.unsqueeze(1).expand(-1, group, -1, -1),
            attn_mask=_causal_mask(len(x), keys.shape[1], x.device),
        )
        return self._linear(
            mixed.flatten(0, 1).transpose(0, 1).flatten(1), layer, "self_attn.o_proj"
        )

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        gate = functional.silu(self._linear(x, layer, "mlp.gate_proj"))
        return self._linear(gate * self._linear(x, layer, "mlp.up_proj"), layer, "mlp.down_proj")

    def _linear(self, x: Tensor, layer: int, name: str) -> Tensor:
        return functional.linear(x, self._weights[f"model.layers.{layer}.{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        # In float32: the mean of squares would overflow float16.
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return self._weights[name] * wide.to(x.dtype)

    def _rotation(self, positions: Tensor) -> Tensor:
        """Return the angles of some positions, shape ``(n, head_dim / 2)``."""
        return torch.outer(positions.float(), rotary_frequencies(self.config, positions.device))


def rotary_frequencies(config: ModelConfig, device: torch.device | None = None) -> Tensor:
    """Return the radians by which each pair turns per position, shape ``(head_dim / 2,)``."""
    exponents = torch.arange(0, config.head_dim, 2, device=device)
    frequencies = config.rope_theta ** (-exponents.float() / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    # Turns within the original context: few of them are a long wavelength.
    turns = scaling.original_positions * frequencies / tau
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each half-vector pair of ``x``, shape ``(heads, n, head_dim)``, by its angle."""
    cos, sin = rotation.cos().to(x.dtype), rotation.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def _causal_mask(queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Let the last ``queries`` of ``keys`` positions see what is not after them."""
    if queries == 1:
        return None
    positions = torch.arange(keys, device=device)
    return positions <= positions[-queries:, None]
