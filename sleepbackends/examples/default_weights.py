"""A checkpoint of about half a gibibyte, made once in the user's cache directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from math import sqrt
from pathlib import Path

import torch
from platformdirs import user_cache_path
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sleepbackends import StorageError, StorageFullError, WeightsFileError
from sleepbackends.examples.model_config import EMBEDDING, ModelConfig, Shape, read_config

DEFAULT_MODEL = ModelConfig(
    vocab_size=32768,
    hidden_size=768,
    intermediate_size=2048,
    layers=14,
    heads=12,
    kv_heads=4,
    head_dim=64,
)
"""138 million float32 parameters."""

_NAME = "demo-llama-138m.safetensors"
_SPARE_BYTES = 64 << 20


def default_weights(
    directory: Path | None = None, *, on_create: Callable[[Path], object] | None = None
) -> Path:
    """Return the default weights file, and create it if it is not there yet.

    It appears under its name only once it is complete; two processes may do this at once.

    Parameters
    ----------
    directory : Path, optional
        Where to keep it; by default the user's cache directory.
    on_create : callable, optional
        Told the path before the file is created, which takes a few seconds.

    Raises
    ------
    StorageFullError
        If there is not enough space.
    StorageError
        If it cannot be written.
    """
    directory = directory or user_cache_path("sleepbackends")
    path = directory / _NAME
    with contextlib.suppress(WeightsFileError):
        if read_config(path) == DEFAULT_MODEL:
            return path
    _check_space(directory, DEFAULT_MODEL.weights_bytes)
    if on_create is not None:
        on_create(path)
    create_weights(path, DEFAULT_MODEL)
    return path


def create_weights(path: Path, config: ModelConfig, seed: int = 0) -> None:
    """Write a checkpoint with random weights; an existing file is replaced at the end.

    Parameters
    ----------
    path : Path
        Where to.
    config : ModelConfig
        The sizes; the weights are float32.
    seed : int
        The same seed gives the same weights.

    Raises
    ------
    StorageError
        If it cannot be written; nothing is left behind.
    """
    settings = {
        "num_attention_heads": config.heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".part")
        os.close(handle)
        unfinished = Path(name)
        try:
            save_file(_weights(config, seed), unfinished, {"config": json.dumps(settings)})
            _flush(unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"weights file {str(path)!r} cannot be written: {error}",
            hint="free space there, set XDG_CACHE_HOME, or name a weights file of your own",
        ) from error


def _weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _initial(name, shape, config.layers, generator)
        for name, shape in config.shapes.items()
    }


def _initial(name: str, shape: Shape, layers: int, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape)
    scale = 1.0 if name == EMBEDDING else 1 / sqrt(shape[1])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        # Each of these adds to the hidden states, which would otherwise grow with depth.
        scale /= sqrt(2 * layers)
    return torch.randn(shape, generator=generator) * scale


def _flush(path: Path) -> None:
    # Without it, a crash of the machine could leave the name on an empty file.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_space(directory: Path, size_bytes: int) -> None:
    there = next(place for place in (directory, *directory.parents) if place.exists())
    free_bytes = shutil.disk_usage(there).free
    if free_bytes < size_bytes + _SPARE_BYTES:
        raise StorageFullError(
            f"the default weights take {size_bytes} bytes and {free_bytes} are free in "
            f"{str(directory)!r}",
            needed_bytes=size_bytes,
            available_bytes=free_bytes,
            hint="free space there, set XDG_CACHE_HOME, or name a weights file of your own",
        )
