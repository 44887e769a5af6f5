"""Serve two models with one GPU that has room for one of them at a time.

Each model has an engine in a process of its own. One of them is awake and answers; when a request
for the other comes, the first sleeps and the other wakes. Every answer has to be what the model
said before it ever slept. The exit code is 0 if that holds, 1 if not, 2 if it cannot be tried here.

::

    python examples/two_models_one_gpu.py                   # vLLM on one GPU; without vLLM as below
    python examples/two_models_one_gpu.py --engine tiny     # the small engine of this package
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sleepbackends import SleepBackendsError
from sleepbackends.config import load_config
from sleepbackends.examples.default_weights import create_weights
from sleepbackends.examples.model_config import ModelConfig
from sleepbackends.examples.tiny_engine import TinyEngine
from sleepbackends.selection import open_backend

ENVIRONMENT = {
    "SLEEPBACKENDS_VLLM": "1",  # what a user has to set; the rest keeps this example small
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
MODEL = ModelConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=768,
    layers=8,
    heads=8,
    kv_heads=8,
    head_dim=64,
)
MODELS = {"first": 1, "second": 2}
"""By name, the seed of its weights."""

REQUESTS = ["first", "second", "second", "first", "second", "first", "first", "second"]
"""Which model each request is for."""

PROMPTS = [[1, *(31 * i * (row + 3) % 509 + 3 for i in range(12))] for row in range(4)]
NEW_TOKENS = 8
START_S, CALL_S = 300.0, 120.0


class VllmEngine:
    """A vLLM engine in this process.

    Parameters
    ----------
    folder : Path
        Holds the model.
    share : float
        Of the GPU, how much it takes while it is awake.
    """

    def __init__(self, folder: Path, share: float) -> None:
        from vllm import LLM, SamplingParams

        self._make = LLM
        self._folder, self._share = folder, share
        self._params = SamplingParams(
            temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
        )

    def start(self) -> str:
        """Load the model; return the name of the backend that it sleeps with."""
        self._llm = self._make(
            model=str(self._folder),
            skip_tokenizer_init=True,
            enable_sleep_mode=True,
            enforce_eager=True,
            gpu_memory_utilization=self._share,
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            generation_config="vllm",
        )
        (status,) = self._llm.collective_rpc("sleepbackends_status")
        return str(status["backend"])

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """Compute the likeliest tokens after a prompt."""
        (output,) = self._llm.generate(
            [{"prompt_token_ids": list(prompt)}], self._params, use_tqdm=False
        )
        return list(output.outputs[0].token_ids)

    def sleep(self) -> None:
        """Give the memory back."""
        self._llm.sleep(level=1)

    def wake_up(self) -> None:
        """Take it again."""
        self._llm.wake_up()


class SmallEngine:
    """The engine that is part of this package, in the place of vLLM.

    Parameters
    ----------
    folder : Path
        Holds the model.
    share : float
        Of no effect: it takes little.
    """

    def __init__(self, folder: Path, share: float) -> None:
        self._folder = folder

    def start(self) -> str:
        """Load the model; return the name of the backend that it sleeps with."""
        backend: Any = open_backend(load_config()).backend
        self._engine = TinyEngine(backend, self._folder / "model.safetensors")
        return str(backend.name)

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """Compute the likeliest tokens after a prompt."""
        return self._engine.generate(prompt, NEW_TOKENS)

    def sleep(self) -> None:
        """Give the memory back."""
        self._engine.orchestrator.sleep(1)

    def wake_up(self) -> None:
        """Take it again."""
        self._engine.orchestrator.wake_up()


ENGINES: dict[str, Callable[[Path, float], Any]] = {"vllm": VllmEngine, "tiny": SmallEngine}


def serve(connection: Connection, kind: str, folder: Path, share: float) -> None:
    """Be the process of one engine: do what the other end says, until it is closed."""
    engine = ENGINES[kind](folder, share)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(engine, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - the other process raises it
            answer = False, f"{type(error).__name__}: {error}"
        connection.send(answer)


class Remote:
    """An engine in a process of its own, which begins at once to import what it needs.

    Parameters
    ----------
    kind : str
        Which engine.
    folder : Path
        Holds its model.
    share : float
        Of the GPU, how much it takes while it is awake.
    """

    def __init__(self, kind: str, folder: Path, share: float) -> None:
        # CUDA does not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, kind, folder, share))
        self._process.start()
        other.close()

    def call(self, method: str, *arguments: Any, timeout_s: float = CALL_S) -> Any:
        """Call a method of the engine.

        Raises
        ------
        RuntimeError
            If it raised, has ended, or does not answer in time.
        """
        try:
            self._connection.send((method, arguments))
            if not self._connection.poll(timeout_s):
                raise RuntimeError(f"no answer to {method!r} within {timeout_s:.0f} s")
            worked, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"the engine ended before it answered to {method!r}") from error
        if not worked:
            raise RuntimeError(f"{method!r} raised {answer}")
        return answer

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(30)
        self._process.kill()
        self._process.join()


class OneAtATime:
    """Asks the engines, of which one at most is awake.

    Parameters
    ----------
    engines : mapping of str to Remote
        By the name of their model.
    awake : str, optional
        Which of them is awake.
    """

    def __init__(self, engines: Mapping[str, Any], awake: str | None = None) -> None:
        self._engines = engines
        self.awake = awake

    def rest(self) -> None:
        """Put the one that is awake to sleep."""
        if self.awake is not None:
            self._engines[self.awake].call("sleep")
            self.awake = None

    def answer(self, model: str, prompt: Sequence[int]) -> list[int]:
        """Have a model answer, and wake it for that if it is asleep."""
        if self.awake != model:
            self.rest()
            self._engines[model].call("wake_up")
            self.awake = model
        answer: list[int] = self._engines[model].call("answer", prompt)
        return answer


def write_model(folder: Path, seed: int) -> Path:
    """Write a Llama with random weights, as published ones are laid out."""
    folder.mkdir()
    create_weights(folder / "model.safetensors", MODEL, seed)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": MODEL.vocab_size,
        "hidden_size": MODEL.hidden_size,
        "intermediate_size": MODEL.intermediate_size,
        "num_hidden_layers": MODEL.layers,
        "num_attention_heads": MODEL.heads,
        "num_key_value_heads": MODEL.kv_heads,
        "head_dim": MODEL.head_dim,
        "max_position_embeddings": 512,
        "rms_norm_eps": MODEL.norm_eps,
        "rope_theta": MODEL.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def start(engines: Mapping[str, Any]) -> dict[str, list[list[int]]]:
    """Start one engine after another; return what each says before it first sleeps."""
    said = {}
    for model, engine in engines.items():
        backend = engine.call("start", timeout_s=START_S)
        said[model] = [engine.call("answer", prompt) for prompt in PROMPTS]
        engine.call("sleep")
        print(f"{model}: started, backend {backend}, asleep")
    return said


def show_row(*cells: str) -> None:
    """Print a row of the table of requests."""
    print(*(f"{cell:10}" for cell in cells))


def check(engines: Mapping[str, Any], said: Mapping[str, list[list[int]]]) -> int:
    """Have all requests answered, show how, and return the exit code."""
    turns = OneAtATime(engines)
    right = len({json.dumps(each) for each in said.values()}) == len(said)
    if not right:
        print("the models say the same, so nothing can be compared")
    show_row("request", "for", "turn", "seconds", "as before")
    for number, model in enumerate(REQUESTS):
        which = number % len(PROMPTS)
        turn = "" if turns.awake == model else "woken"
        started = time.perf_counter()
        try:
            equal = turns.answer(model, PROMPTS[which]) == said[model][which]
        except RuntimeError as error:
            print(f"something is WRONG: {error}")
            return 1
        seconds = time.perf_counter() - started
        right = right and equal
        show_row(str(number), model, turn, f"{seconds:.3f}", "yes" if equal else "NO")
    turns.rest()
    print("all is right" if right else "something is WRONG")
    return 0 if right else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--engine", choices=ENGINES, help="by default vLLM, if it is installed")
    parser.add_argument("--backend", default="auto", help="a name, or auto for the best one here")
    parser.add_argument(
        "--share",
        type=float,
        default=0.55,
        help="of the GPU, what each vLLM engine takes while awake; over 0.5 only one has room",
    )
    chosen = parser.parse_args(arguments)
    has_vllm = find_spec("vllm") is not None
    kind = chosen.engine or ("vllm" if has_vllm else "tiny")
    if kind == "vllm" and not has_vllm:
        print(
            "vLLM is not installed here: pip install vllm==0.26.0 'sleepbackends[cuda]', "
            "or take --engine tiny"
        )
        return 2
    os.environ["SLEEPBACKENDS_BACKEND"] = chosen.backend
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    engines: dict[str, Remote] = {}
    with tempfile.TemporaryDirectory() as name:
        try:
            for model, seed in MODELS.items():
                folder = write_model(Path(name, model), seed)
                engines[model] = Remote(kind, folder, chosen.share)
            said = start(engines)
        except (SleepBackendsError, RuntimeError) as error:
            print(f"failed: {error}")
            return 2
        else:
            return check(engines, said)
        finally:
            for engine in engines.values():
                engine.close()


if __name__ == "__main__":
    sys.exit(main())
