"""Put a vLLM engine to sleep with sleepbackends, and check that it computes the same afterwards.

The engine sleeps and wakes, wakes in parts in both orders, and gives its KV cache back while the
weights stay. After each step the tokens have to be those of before, and while memory is away the
GPU has to have it. The exit code is 0 if all of that holds, 1 if not, 2 if it cannot be tried here.

::

    python examples/vllm_sleep.py                  # a small Llama with random weights, on one GPU
    python examples/vllm_sleep.py --graphs         # with captured CUDA graphs
    python examples/vllm_sleep.py --model FOLDER   # any model that vLLM can load
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sleepbackends.adapters.vllm.engine import release_kv_cache, restore_kv_cache

ENVIRONMENT = {
    "SLEEPBACKENDS_VLLM": "1",  # what a user has to set; the rest keeps this example small
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
KV_BYTES = 1 << 30
PROMPTS = [[1, *(31 * i * (row + 3) % 509 + 3 for i in range(12))] for row in range(8)]
GIB = 1 << 30


def start_engine(folder: str | None, graphs: bool) -> Any:
    """Start an engine in this process; without a folder its weights are random."""
    from vllm import LLM

    options: dict[str, Any] = {"enforce_eager": True}
    if graphs:
        compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        options = {"compilation_config": compilation}
    with tempfile.TemporaryDirectory() as made:
        if folder is None:
            folder = made
            Path(made, "config.json").write_text(json.dumps(SMALL_LLAMA), encoding="utf-8")
            options["load_format"] = "dummy"
            options["skip_tokenizer_init"] = True
        return LLM(
            model=folder,
            enable_sleep_mode=True,
            gpu_memory_utilization=0.3,
            kv_cache_memory_bytes=KV_BYTES,
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


def free_bytes() -> int:
    """Return what the GPU has free."""
    import torch

    free: int = torch.cuda.mem_get_info()[0]
    return free


def steps(llm: Any) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Yield what is tried: a name, how memory goes, how it comes back."""
    yield "sleep(1), wake_up()", lambda: llm.sleep(level=1), llm.wake_up
    for order in (("weights", "kv_cache"), ("kv_cache", "weights")):

        def in_parts(order: Sequence[str] = order) -> None:
            for tag in order:
                llm.wake_up(tags=[tag])

        yield f"sleep(1), wake_up {' then '.join(order)}", lambda: llm.sleep(level=1), in_parts
    yield "sleep(1), wake_up() again", lambda: llm.sleep(level=1), llm.wake_up
    yield "KV cache alone", lambda: release_kv_cache(llm), lambda: restore_kv_cache(llm)


def show_row(step: str, *cells: str) -> None:
    """Print a row of the table of steps."""
    print(f"{step:44}", *(f"{cell:>14}" for cell in cells))


def check(
    llm: Any,
    compute: Callable[[Any], list[list[int]]] = generate,
    free: Callable[[], int] = free_bytes,
) -> int:
    """Go through all steps, show what each did, and return the exit code."""
    (status,) = llm.collective_rpc("sleepbackends_status")
    print(f"backend: {status['backend']}")
    expected = compute(llm)
    right = compute(llm) == expected
    if not right:
        print("this model does not compute the same twice, so nothing can be compared")
    show_row("step", "released GiB", "seconds", "back, seconds", "tokens equal")
    for name, go, come_back in steps(llm):
        before = free()
        go()
        released = free() - before
        (asleep,) = llm.collective_rpc("sleepbackends_status")
        come_back()
        (awake,) = llm.collective_rpc("sleepbackends_status")
        equal = compute(llm) == expected
        right = right and equal and released >= KV_BYTES // 2
        seconds = [f"{each['last']['seconds']:.3f}" for each in (asleep, awake)]
        show_row(name, f"{released / GIB:.2f}", *seconds, "yes" if equal else "NO")
    print("all is right" if right else "something is WRONG")
    return 0 if right else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", metavar="FOLDER", help="a model, instead of a small random one")
    parser.add_argument("--graphs", action="store_true", help="capture CUDA graphs")
    chosen = parser.parse_args(arguments)
    if find_spec("vllm") is None:
        print("vLLM is not installed here: pip install vllm==0.26.0 'sleepbackends[cuda]'")
        return 2
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return check(start_engine(chosen.model, chosen.graphs))


if __name__ == "__main__":
    sys.exit(main())
