from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sleepbackends import WeightsFileError
from sleepbackends.examples.default_weights import create_weights
from sleepbackends.examples.model_config import ModelConfig, RopeScaling, read_config
from sleepbackends.examples.tiny_model import KVCache, TinyModel, rotary_frequencies

SMALL = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
)
IDS = torch.tensor([3, 60, 17, 17, 42, 5, 0, 8, 33, 21])


def model_of(config: ModelConfig, path: Path) -> TinyModel:
    create_weights(path, config)
    return TinyModel(config, load_file(path))


def cache_of(config: ModelConfig, capacity: int = 16) -> KVCache:
    shape = (config.layers, config.kv_heads, capacity, config.head_dim)
    return KVCache(torch.zeros(shape), torch.zeros(shape))


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, tied=True),
        replace(SMALL, kv_heads=4),
        replace(SMALL, kv_heads=1, rope_theta=100.0),
        replace(SMALL, rope_scaling=RopeScaling(4.0, 1.0, 4.0, 8.0)),
    ],
)
def test_decoding_with_a_cache_equals_the_whole_forward(
    config: ModelConfig, tmp_path: Path
) -> None:
    model = model_of(config, tmp_path / "model.safetensors")
    whole = model.logits(model.hidden(IDS))
    assert whole.shape == (len(IDS), config.vocab_size)

    cache = cache_of(config)
    parts = [model.hidden(IDS[:4], cache), model.hidden(IDS[4:6], cache, start=4)]
    parts += [model.hidden(IDS[i : i + 1], cache, start=i) for i in range(6, len(IDS))]
    torch.testing.assert_close(model.logits(torch.cat(parts)), whole, rtol=1e-4, atol=1e-5)
    assert cache.keys[:, :, : len(IDS)].any(dim=-1).all(), "every position was stored"
    assert not cache.keys[:, :, len(IDS) :].any(), "and nothing behind them"


def test_what_comes_later_changes_nothing_before(tmp_path: Path) -> None:
    model = model_of(SMALL, tmp_path / "model.safetensors")
    changed = IDS.clone()
    changed[6] += 1
    before, after = model.hidden(IDS), model.hidden(changed)
    torch.testing.assert_close(before[:6], after[:6])
    assert (before[6:] - after[6:]).abs().amax(dim=1).min() > 1e-3


def test_positions_count_by_their_distance(tmp_path: Path) -> None:
    model = model_of(SMALL, tmp_path / "model.safetensors")
    here = model.hidden(IDS)
    torch.testing.assert_close(model.hidden(IDS, start=1000), here, rtol=1e-3, atol=1e-4)
    swapped = model.hidden(IDS[[1, 0, *range(2, len(IDS))]])
    assert (swapped[-1] - here[-1]).abs().max() > 1e-3


def test_long_wavelengths_are_stretched() -> None:
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=64
    )
    config = replace(SMALL, head_dim=16, rope_theta=1000.0, rope_scaling=scaling)
    expected, kinds = [], set()
    for pair in range(8):
        plain = 1000.0 ** (-pair / 8)
        turns = 64 * plain / (2 * math.pi)
        if turns < 1:
            kinds.add("long")
            expected.append(plain / 8)
        elif turns > 4:
            kinds.add("short")
            expected.append(plain)
        else:
            kinds.add("between")
            smooth = (turns - 1) / 3
            expected.append((1 - smooth) * plain / 8 + smooth * plain)
    assert kinds == {"long", "between", "short"}
    torch.testing.assert_close(rotary_frequencies(config), torch.tensor(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = model_of(SMALL, path)
    halves = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    logits = TinyModel(SMALL, halves).logits(TinyModel(SMALL, halves).hidden(IDS))
    assert logits.dtype == dtype
    whole = model.logits(model.hidden(IDS))
    torch.testing.assert_close(logits.float(), whole, rtol=0.1, atol=0.1)


# What a file says


@pytest.mark.parametrize(
    "config", [SMALL, replace(SMALL, tied=True), replace(SMALL, rope_theta=5e5, norm_eps=1e-5)]
)
def test_the_configuration_is_derived_from_the_file(config: ModelConfig, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    create_weights(path, config)
    assert read_config(path) == config
    assert config.parameters * 4 == sum(tensor.nbytes for tensor in load_file(path).values())


PUBLISHED = {
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "head_dim": None,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def published(
    folder: Path, settings: object = PUBLISHED, tensors: dict[str, Tensor] | None = None
) -> Path:
    """Write a checkpoint as they are published: tensors, and config.json beside them."""
    path = folder / "model.safetensors"
    create_weights(path, SMALL)
    save_file({**load_file(path), **(tensors or {})}, path)
    (folder / "config.json").write_text(
        settings if isinstance(settings, str) else json.dumps(settings), encoding="utf-8"
    )
    return path


def test_a_config_beside_the_file_tells_the_rest(tmp_path: Path) -> None:
    path = published(
        tmp_path, tensors={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    )
    scaling = RopeScaling(32.0, 1.0, 4.0, 8192)
    assert read_config(path) == replace(SMALL, norm_eps=1e-5, rope_theta=5e5, rope_scaling=scaling)


def test_newer_configs_put_the_base_with_the_scaling(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1234.0}
    path = published(tmp_path, {"head_dim": 8, "rope_parameters": rope})
    assert read_config(path) == replace(SMALL, rope_theta=1234.0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "how many attention heads"),
        ("{", "cannot be read"),
        ("[]", "not an object"),
        ({"num_attention_heads": 0}, "0 for num_attention_heads"),
        ({"num_attention_heads": "4"}, "'4' for num_attention_heads"),
        ({"num_attention_heads": 5}, "5 heads cannot share"),
        ({"num_attention_heads": 64}, "64 heads cannot share"),
        ({"num_attention_heads": 32}, "of size 1"),
        ({**PUBLISHED, "rope_theta": -1}, "-1 for rope_theta"),
        ({**PUBLISHED, "hidden_act": "gelu"}, "activation 'gelu'"),
        ({**PUBLISHED, "rope_scaling": {"type": "yarn"}}, "rotary scaling 'yarn'"),
        ({**PUBLISHED, "rope_scaling": {"rope_type": "llama3"}}, "0 for factor"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(settings: object, said: str, tmp_path: Path) -> None:
    path = published(tmp_path, settings)
    with pytest.raises(WeightsFileError, match=said) as caught:
        read_config(path)
    assert str(path) in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"model.layers.1.mlp.up_proj.weight": torch.ones(48, 31)}, "(48, 32) fits"),
        ({"model.layers.1.self_attn.q_proj.bias": torch.ones(32)}, "1 are unknown"),
        ({"model.layers.7.input_layernorm.weight": torch.ones(32)}, "9 tensors are missing"),
        ({"model.embed_tokens.weight": torch.ones(61)}, "of shape (61,)"),
        ({"model.norm.weight": torch.ones(32).half()}, "dtype F16, F32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tensors: dict[str, Tensor], said: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsFileError) as caught:
        read_config(published(tmp_path, tensors=tensors))
    assert said in str(caught.value)


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"encoder.weight": torch.ones(3, 3)}, path)
    with pytest.raises(WeightsFileError, match=r"has no model\.embed_tokens\.weight"):
        read_config(path)


@pytest.mark.parametrize("damage", ["missing", "a folder", "empty", "garbage", "truncated"])
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    create_weights(path, SMALL)
    whole = path.read_bytes()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage != "missing":
        kept: dict[str, Any] = {"empty": b"", "garbage": whole[::-1], "truncated": whole[:-1]}
        path.write_bytes(kept[damage])
    with pytest.raises(WeightsFileError, match="missing or not a sound safetensors file"):
        read_config(path)
