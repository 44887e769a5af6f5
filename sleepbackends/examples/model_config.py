"""What a Llama-style checkpoint is, read from its header before anything is allocated."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sleepbackends import WeightsFileError

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Older checkpoints store the rotary frequencies, which follow from the configuration.
_IGNORED = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 and later stretch the rotary frequencies.

    Parameters
    ----------
    factor : float
        By how much long wavelengths are stretched.
    low_freq_factor, high_freq_factor : float
        Wavelengths over ``original_positions / low`` are stretched in full, those under
        ``original_positions / high`` not at all.
    original_positions : float
        The context length before stretching.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: float


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a Llama-style decoder.

    Parameters
    ----------
    vocab_size, hidden_size, intermediate_size, layers : int
        Sizes along the axes of the weights.
    heads, kv_heads, head_dim : int
        Query heads, heads of keys and values, and the size of each.
    rope_theta : float
        Base of the rotary frequencies.
    norm_eps : float
        Added to the mean square before its root is taken.
    rope_scaling : RopeScaling or None
        None leaves the frequencies as they are.
    tied : bool
        Whether the output projection is the embedding.
    dtype : str
        The dtype of all weights, as the file names it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    rope_scaling: RopeScaling | None = None
    tied: bool = False
    dtype: str = "F32"

    @property
    def shapes(self) -> dict[str, Shape]:
        """The name and shape of every weight."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, Shape] = {EMBEDDING: (self.vocab_size, hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                prefix + "input_layernorm.weight": (hidden,),
                prefix + "self_attn.q_proj.weight": (queries, hidden),
                prefix + "self_attn.k_proj.weight": (keys, hidden),
                prefix + "self_attn.v_proj.weight": (keys, hidden),
                prefix + "self_attn.o_proj.weight": (hidden, queries),
                prefix + "post_attention_layernorm.weight": (hidden,),
                prefix + "mlp.gate_proj.weight": (inner, hidden),
                prefix + "mlp.up_proj.weight": (inner, hidden),
                prefix + "mlp.down_proj.weight": (hidden, inner),
            }
        shapes[NORM] = (hidden,)
        if not self.tied:
            shapes[HEAD] = (self.vocab_size, hidden)
        return shapes

    @property
    def parameters(self) -> int:
        """How many numbers the weights are."""
        return sum(map(prod, self.shapes.values()))

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights."""
        return self.parameters * _DTYPE_BYTES[self.dtype]

    @property
    def position_bytes(self) -> int:
        """Bytes of the keys and values of one position."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _DTYPE_BYTES[self.dtype]


def read_config(path: Path) -> ModelConfig:
    """Derive the configuration of a safetensors file from its header.

    Sizes come from the shapes of the tensors. What shapes do not tell (the number of heads,
    the base of the rotary frequencies, the epsilon) comes from ``config`` in the metadata of
    the file, as JSON, or from a ``config.json`` beside it.

    Raises
    ------
    WeightsFileError
        If the file is missing or damaged, or does not hold such a model.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = [name for name in file.keys() if not name.endswith(_IGNORED)]  # noqa: SIM118
            slices = {name: file.get_slice(name) for name in names}
            shapes = {name: tuple(slices[name].get_shape()) for name in names}
            dtypes = {slices[name].get_dtype() for name in names}
    except (OSError, SafetensorError) as error:
        raise WeightsFileError(
            f"weights file {str(path)!r} is missing or not a sound safetensors file: {error}",
            hint="check the path, or download or export the file again",
        ) from error
    reader = _Reader(path, shapes)
    return reader.derive(reader.settings(metadata), dtypes)


class _Reader:
    """Derives the configuration of one file; every refusal names the file."""

    def __init__(self, path: Path, shapes: Mapping[str, Shape]) -> None:
        self._path = path
        self._shapes = shapes

    def settings(self, metadata: Mapping[str, str]) -> Mapping[str, Any]:
        """Return what the metadata or the file beside it says; empty without either."""
        place = self._path.with_name("config.json")
        try:
            if "config" in metadata:
                said = json.loads(metadata["config"])
            elif place.exists():
                said = json.loads(place.read_text(encoding="utf-8"))
            else:
                said = {}
        except (OSError, ValueError) as error:
            raise self._error(f"has a configuration that cannot be read: {error}") from error
        if not isinstance(said, dict):
            raise self._error("has a configuration that is not an object")
        return said

    def derive(self, settings: Mapping[str, Any], dtypes: set[str]) -> ModelConfig:
        """Put shapes and settings together and check that they fit each other."""
        activation = settings.get("hidden_act", "silu")
        if activation != "silu":
            raise self._error(f"is a model with the activation {activation!r}, not 'silu'")
        vocab_size, hidden_size = self._matrix(EMBEDDING)
        if len(dtypes) != 1 or not dtypes <= _DTYPE_BYTES.keys():
            raise self._error(
                f"holds tensors of dtype {', '.join(sorted(dtypes)) or 'none'}",
                hint=f"all of them must be of one dtype among {', '.join(_DTYPE_BYTES)}",
            )
        queries, keys = (self._matrix(_first(f"self_attn.{w}_proj"))[0] for w in "qk")
        heads, head_dim = self._heads(settings, queries)
        rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
        config = ModelConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=self._matrix(_first("mlp.gate_proj"))[0],
            layers=len({match[1] for name in self._shapes if (match := _LAYER.match(name))}),
            heads=heads,
            kv_heads=keys // head_dim,
            head_dim=head_dim,
            rope_theta=self._number({**rope, **settings}, "rope_theta", 10000.0),
            norm_eps=self._number(settings, "rms_norm_eps", 1e-6),
            rope_scaling=self._rope_scaling(rope),
            tied=HEAD not in self._shapes,
            dtype=next(iter(dtypes)),
        )
        self._check(config)
        return config

    def _heads(self, settings: Mapping[str, Any], queries: int) -> tuple[int, int]:
        if settings.get("head_dim") is not None:
            head_dim = self._count(settings, "head_dim")
            heads = queries // head_dim
        elif "num_attention_heads" in settings:
            heads = self._count(settings, "num_attention_heads")
            head_dim = queries // heads
        else:
            raise self._error(
                "does not tell how many attention heads the model has",
                hint="put the config.json of the model beside the file",
            )
        if heads * head_dim != queries:
            raise self._error(f"has {queries} rows of queries, which {heads} heads cannot share")
        return heads, head_dim

    def _rope_scaling(self, rope: Mapping[str, Any]) -> RopeScaling | None:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return None
        if kind != "llama3":
            raise self._error(
                f"is a model with the rotary scaling {kind!r} (known: 'default', 'llama3')"
            )
        return RopeScaling(
            factor=self._number(rope, "factor", 0),
            low_freq_factor=self._number(rope, "low_freq_factor", 0),
            high_freq_factor=self._number(rope, "high_freq_factor", 0),
            original_positions=self._number(rope, "original_max_position_embeddings", 0),
        )

    def _number(self, settings: Mapping[str, Any], name: str, default: float) -> float:
        value = settings.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self._error(f"has {value!r} for {name}, which must be a positive number")
        return value

    def _count(self, settings: Mapping[str, Any], name: str) -> int:
        value = settings[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(f"has {value!r} for {name}, which must be a positive integer")
        return value

    def _matrix(self, name: str) -> tuple[int, int]:
        shape = self._shapes.get(name, ())
        if len(shape) != 2 or not all(shape):
            what = f"has {name} of shape {shape}" if name in self._shapes else f"has no {name}"
            raise self._error(what)
        return shape[0], shape[1]

    def _check(self, config: ModelConfig) -> None:
        if config.head_dim % 2 or not config.kv_heads or config.heads % config.kv_heads:
            raise self._error(
                f"does not fit its configuration: {config.heads} heads and {config.kv_heads} "
                f"heads of keys and values, of size {config.head_dim}"
            )
        expected = config.shapes
        missing = sorted(expected.keys() - self._shapes.keys())
        unknown = sorted(self._shapes.keys() - expected.keys())
        wrong = sorted(n for n in expected.keys() - missing if self._shapes[n] != expected[n])
        if missing or unknown:
            said = [f"{len(missing)} tensors are missing ({missing[0]})"] if missing else []
            said += [f"{len(unknown)} are unknown ({unknown[0]})"] if unknown else []
            raise self._error(f"is not a whole Llama-style model: {', '.join(said)}")
        if wrong:
            name = wrong[0]
            raise self._error(
                f"has {name} of shape {self._shapes[name]}, where {expected[name]} fits"
            )

    def _error(self, what: str, hint: str = "") -> WeightsFileError:
        return WeightsFileError(
            f"weights file {str(self._path)!r} {what}",
            hint=hint
            or "give one file that holds a whole Llama-style model, with the names "
            "of the published checkpoints, and its config.json beside it",
        )


def _first(name: str) -> str:
    return f"model.layers.0.{name}.weight"
