"""A loop of reinforcement learning around one engine, and a check that every step is right.

Generate, give the KV cache back while a trainer needs the memory, update the weights in place,
take the KV cache again, generate with the new weights. What comes out has to be what an engine
says that was started with those weights, nothing may have moved, and old keys and values may
not have been used. The exit code is 0 if all of that holds.

::

    python examples/rl_weight_sync.py                     # the best backend of this machine
    python examples/rl_weight_sync.py --backend host
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors.torch import load_file

from sleepbackends import RequestError, SleepBackendsError, SleepConfig
from sleepbackends.examples.default_weights import create_weights
from sleepbackends.examples.model_config import ModelConfig
from sleepbackends.examples.tiny_engine import TinyEngine
from sleepbackends.selection import open_backend

MODEL = ModelConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    layers=4,
    heads=8,
    kv_heads=2,
    head_dim=16,
)
PROMPT = [7919 * i % MODEL.vocab_size for i in range(24)]
NEW_TOKENS = 16


def start_engine(backend_name: str, weights_path: Path) -> TinyEngine:
    """Load the weights into a backend of that name, and give it a KV cache."""
    backend = open_backend(SleepConfig(backend=backend_name)).backend
    return TinyEngine(backend, weights_path, kv_bytes=8 << 20)  # type: ignore[arg-type]


def train(folder: Path, step: int) -> Path:
    """Stand in for a trainer: write the weights after a step to a file."""
    path = folder / f"step-{step}.safetensors"
    create_weights(path, MODEL, seed=step)
    return path


def sync_weights(engine: TinyEngine, path: Path) -> None:
    """Overwrite the engine's weights where they are, while the KV cache is away."""
    new = load_file(path)
    with engine.orchestrator.use({"weights"}, holder="weight sync"):
        for name, tensor in engine.weights.items():
            tensor.copy_(new[name])


def expected_tokens(backend_name: str, path: Path) -> list[int]:
    """Ask an engine that was started with these weights."""
    engine = start_engine(backend_name, path)
    try:
        return engine.generate(PROMPT, NEW_TOKENS)
    finally:
        engine.close()


def addresses(engine: TinyEngine) -> list[int]:
    """Where the weights and the KV cache are."""
    cache = engine.kv_cache
    return [tensor.data_ptr() for tensor in (*engine.weights.values(), cache.keys, cache.values)]


def run_step(engine: TinyEngine, backend_name: str, folder: Path, step: int) -> Iterator[str]:
    """Go through one step of the loop, and yield what is not as it has to be."""
    where, kv_bytes = addresses(engine), 2 * engine.kv_cache.keys.nbytes
    rollout = engine.generate(PROMPT, NEW_TOKENS)

    released = engine.orchestrator.release_kv_cache()
    if released.released_bytes < kv_bytes:
        yield f"{released.released_bytes} bytes of a KV cache of {kv_bytes} were released"
    path = train(folder, step)
    sync_weights(engine, path)
    engine.orchestrator.wake_up()

    tokens = engine.generate(PROMPT, NEW_TOKENS)
    if tokens != expected_tokens(backend_name, path):
        yield f"generated {tokens}, which is not what the new weights say"
    if tokens == rollout:
        yield "the new weights made no difference"
    if addresses(engine) != where:
        yield "weights or KV cache moved"
    print(
        f"step {step}: {released.released_bytes / 2**20:.1f} MiB released in "
        f"{released.seconds * 1000:.1f} ms, then generated {tokens[:4]} ..."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the loop; return the exit code."""
    parser = argparse.ArgumentParser(description="reinforcement learning with one engine")
    parser.add_argument("--backend", default="auto", help="a name, or auto for the best one here")
    parser.add_argument("--steps", type=int, default=3, help="how many weight updates to make")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.steps < 1:
            raise RequestError(f"{chosen.steps} steps check nothing", hint="take one or more")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            engine = start_engine(chosen.backend, train(folder, 0))
            print(f"backend: {engine.orchestrator.backend.name}")
            try:
                wrong = [
                    f"step {step}: {difference}"
                    for step in range(1, chosen.steps + 1)
                    for difference in run_step(engine, chosen.backend, folder, step)
                ]
            finally:
                engine.close()
    except SleepBackendsError as error:
        print(f"failed: {error}")
        return 2
    for difference in wrong:
        print(f"wrong: {difference}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
