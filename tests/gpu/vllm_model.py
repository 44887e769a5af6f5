"""A model for vLLM, and whether there is a vLLM that could load it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sleepbackends.adapters.vllm.versions import SUPPORTED, find

VOCABULARY = 512


def obstacle() -> str:
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    try:
        installed = version("vllm")
    except PackageNotFoundError:  # unpacked without its metadata
        import vllm

        installed = str(vllm.__version__)
    if find(installed) is None:
        return f"vLLM {installed} is none of those supported: {', '.join(SUPPORTED)}"
    return ""


def save_model(folder: Path) -> Path:
    """Save a Llama with random weights, large enough for the tokens to depend on them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(7)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer beside it, of words ``t0``, ``t1`` and so on."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(VOCABULARY)}
    special = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2"}
    tokenizer = Tokenizer(WordLevel(words, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = Whitespace()
    of_transformers: Any = PreTrainedTokenizerFast
    fast = of_transformers(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder)
