"""One vLLM engine in this process, over whichever allocator the environment chooses.

Nothing of sleepbackends is imported here: what vLLM loads of it is for vLLM to say.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

GIB, MIB = 1 << 30, 1 << 20

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 512,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
"""Llama models: about half a GiB, and the 15 GiB of an 8B."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""For vLLM to run in this process alone and ask no network."""

PROMPTS = [[1, *(31 * i * (row + 3) % 509 + 3 for i in range(12))] for row in range(8)]


def start(shape: str, kv_bytes: int, *, graphs: bool = True, sleep_mode: bool = True) -> Any:
    """Start an engine whose weights are random and the same each time; return its ``LLM``."""
    from vllm import LLM

    options: dict[str, Any] = {"enforce_eager": True}
    if graphs:
        compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        options = {"compilation_config": compilation}
    with tempfile.TemporaryDirectory() as folder:
        config = {**_LLAMA, **SHAPES[shape]}
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        return LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            enable_sleep_mode=sleep_mode,
            gpu_memory_utilization=0.3,
            kv_cache_memory_bytes=kv_bytes,
            max_model_len=256,
            max_num_seqs=len(PROMPTS),
            max_num_batched_tokens=256,
            seed=0,
            generation_config="vllm",
            **options,
        )


def generate(llm: Any) -> list[list[int]]:
    """Compute the likeliest tokens after each prompt."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def worker_of(llm: Any) -> Any:
    """Return the worker of an engine that runs in this process."""
    worker = llm.llm_engine.model_executor.driver_worker
    return getattr(worker, "worker", worker)


def sum_weights(llm: Any) -> list[int]:
    """Sum the bits of each parameter, so that a changed one is found."""
    import torch

    model = worker_of(llm).model_runner.get_model()
    return [
        int(parameter.detach().view(torch.int16).sum(dtype=torch.int64))
        for _, parameter in sorted(model.named_parameters())
    ]


def free_bytes() -> int:
    """Return what the driver calls free, once everything queued has run."""
    import torch

    torch.cuda.synchronize()
    free: int = torch.cuda.mem_get_info()[0]
    return free


def allocator() -> str:
    """Tell whose allocator this process uses: ``vllm``, ``sleepbackends`` or ``none``."""
    module = sys.modules.get("vllm.device_allocator.cumem")
    instance = module.CuMemAllocator.instance if module is not None else None
    return "none" if instance is None else type(instance).__module__.partition(".")[0]


def facts() -> dict[str, str]:
    """Tell what the figures depend on."""
    import torch
    import vllm

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
    }
