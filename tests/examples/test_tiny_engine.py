from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sleepbackends import (
    Capabilities,
    HookError,
    RequestError,
    SleepConfig,
    Status,
    SuspendedError,
    UnsupportedOperationError,
    WeightsFileError,
)
from sleepbackends.examples.default_weights import create_weights
from sleepbackends.examples.model_config import ModelConfig
from sleepbackends.examples.tiny_engine import TinyEngine
from sleepbackends.host.backend import HostBackend

SMALL = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
)
CAPACITY = 1024
PROMPT = [3, 60, 17, 17, 42, 5, 0, 8, 33, 21]
N = 6


@pytest.fixture
def weights_path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    create_weights(path, SMALL)
    return path


@pytest.fixture
def engine(weights_path: Path) -> Iterator[TinyEngine]:
    engine = TinyEngine(HostBackend(), weights_path, kv_bytes=CAPACITY * SMALL.position_bytes)
    yield engine
    engine.close()


@pytest.fixture
def other_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def addresses(engine: TinyEngine) -> list[int]:
    cache = engine.kv_cache
    return [t.data_ptr() for t in (*engine.weights.values(), cache.keys, cache.values)]


def computed_by(engine: TinyEngine, prompt: list[int]) -> int:
    """Count the positions that went through the model for one more request."""
    before = engine.computed_positions
    engine.generate(prompt, N)
    return engine.computed_positions - before


def test_its_memory_is_in_two_tags(engine: TinyEngine) -> None:
    tags = engine.orchestrator.state().memory.tags
    assert tags["weights"].resident_bytes == SMALL.weights_bytes
    assert tags["kv_cache"].resident_bytes == CAPACITY * SMALL.position_bytes
    assert engine.kv_cache.capacity == CAPACITY


def test_it_generates_what_the_model_says(engine: TinyEngine, weights_path: Path) -> None:
    ids = list(PROMPT)
    for _ in range(N):
        hidden = engine._model.hidden(torch.tensor(ids))
        ids.append(int(engine._model.logits(hidden[-1]).argmax()))
    assert engine.generate(PROMPT, N) == ids[len(PROMPT) :]
    assert engine.generate(PROMPT, 0) == []


def test_a_prompt_is_computed_from_where_it_differs(engine: TinyEngine) -> None:
    fresh = len(PROMPT) - 1 + N
    tokens = engine.generate(PROMPT, N)
    assert engine.computed_positions == fresh
    assert engine.generate(PROMPT, N) == tokens
    assert engine.computed_positions == fresh + N
    assert computed_by(engine, [*PROMPT[:4], 1, 2, 3]) == 2 + N
    assert computed_by(engine, [9, *PROMPT]) == len(PROMPT) + N, "nothing in common"
    assert engine.generate(PROMPT, N) == tokens


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes_up_as_it_was(engine: TinyEngine, level: int) -> None:
    tokens, where = engine.generate(PROMPT, N), addresses(engine)
    before = {name: tensor.clone() for name, tensor in engine.weights.items()}
    engine.orchestrator.sleep(level)
    state = engine.orchestrator.state()
    assert (state.status, state.memory.mapped_bytes) == (Status.ASLEEP, 0)
    engine.orchestrator.wake_up()
    assert all(torch.equal(engine.weights[name], tensor) for name, tensor in before.items())
    assert addresses(engine) == where
    assert not engine.kv_cache.keys.any()
    assert computed_by(engine, PROMPT) == len(PROMPT) - 1 + N, "the prefix cache was dropped"
    assert engine.generate(PROMPT, N) == tokens


def test_weights_serve_while_the_cache_is_released(
    engine: TinyEngine, other_thread: ThreadPoolExecutor
) -> None:
    tokens, embedding = engine.generate(PROMPT, N), engine.embed(PROMPT)
    assert embedding.shape == (SMALL.hidden_size,)
    engine.orchestrator.release_kv_cache()
    assert torch.equal(other_thread.submit(engine.embed, PROMPT).result(), embedding)
    with pytest.raises(SuspendedError):
        engine.generate(PROMPT, N)
    engine.orchestrator.wake_up()
    assert computed_by(engine, PROMPT) == len(PROMPT) - 1 + N, "the prefix cache was dropped"
    assert engine.generate(PROMPT, N) == tokens


def test_other_threads_are_refused_at_once_while_asleep(
    engine: TinyEngine, other_thread: ThreadPoolExecutor
) -> None:
    tokens = other_thread.submit(engine.generate, PROMPT, N).result()
    engine.orchestrator.sleep(1)
    for request in (
        other_thread.submit(engine.generate, PROMPT, N),
        other_thread.submit(engine.embed, PROMPT),
    ):
        with pytest.raises(SuspendedError):
            request.result(timeout=5)
    engine.orchestrator.wake_up()
    assert other_thread.submit(engine.generate, PROMPT, N).result() == tokens


def start_long(engine: TinyEngine, pool: ThreadPoolExecutor) -> Future[list[int]]:
    request = pool.submit(engine.generate, PROMPT, CAPACITY - len(PROMPT))
    while engine.computed_positions < len(PROMPT) + 1:
        time.sleep(0.001)
    assert not request.done()
    return request


def test_abort_ends_a_running_request(engine: TinyEngine, other_thread: ThreadPoolExecutor) -> None:
    request = start_long(engine, other_thread)
    engine.orchestrator.sleep(1, mode="abort")
    with pytest.raises(SuspendedError, match="aborted"):
        request.result(timeout=5)
    engine.orchestrator.wake_up()
    assert len(engine.generate(PROMPT, N)) == N


def test_wait_lets_a_running_request_finish(
    engine: TinyEngine, other_thread: ThreadPoolExecutor
) -> None:
    request = start_long(engine, other_thread)
    engine.orchestrator.sleep(1, mode="wait")
    assert len(request.result(timeout=5)) == CAPACITY - len(PROMPT)


def test_requests_of_several_threads_do_not_mix(engine: TinyEngine) -> None:
    prompts = [PROMPT[i:] for i in range(6)]
    expected = [engine.generate(prompt, N) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda i: engine.generate(prompts[i % 6], N), range(24)))
    assert got == expected * 4


def test_other_tags_leave_the_prefix_cache_alone(engine: TinyEngine) -> None:
    engine.generate(PROMPT, N)
    engine.drop_caches({"runtime"})
    assert computed_by(engine, PROMPT) == N
    engine.drop_caches({"weights"})
    assert computed_by(engine, PROMPT) == len(PROMPT) - 1 + N


# Reload


def test_reload_reads_the_file_as_it_is_now(engine: TinyEngine, weights_path: Path) -> None:
    where = addresses(engine)
    create_weights(weights_path, SMALL, seed=1)
    engine.orchestrator.sleep(2)
    engine.orchestrator.wake_up()
    assert addresses(engine) == where
    for name, tensor in load_file(weights_path).items():
        assert torch.equal(engine.weights[name], tensor)


@pytest.mark.parametrize("damage", ["missing", "another model"])
def test_a_failed_reload_can_be_made_again(
    damage: str, engine: TinyEngine, weights_path: Path
) -> None:
    tokens, whole = engine.generate(PROMPT, N), weights_path.read_bytes()
    engine.orchestrator.sleep(2)
    weights_path.unlink()
    if damage == "another model":
        create_weights(weights_path, replace(SMALL, layers=1))
    with pytest.raises(HookError) as caught:
        engine.orchestrator.wake_up()
    assert isinstance(caught.value.__cause__, WeightsFileError)
    assert engine.orchestrator.state().status is Status.FAULTED
    weights_path.write_bytes(whole)
    engine.orchestrator.wake_up()
    assert engine.generate(PROMPT, N) == tokens


def test_a_cache_that_is_kept_at_level_1_is_reset_at_level_2(weights_path: Path) -> None:
    policies: Any = {"kv_cache": {"level_1": "offload", "level_2": "discard"}}
    config = SleepConfig(policies=policies, fill="poison")  # type: ignore[arg-type]
    engine = TinyEngine(HostBackend(None, config.settings), weights_path, config=config)
    tokens = engine.generate(PROMPT, N)
    engine.orchestrator.sleep(1)
    engine.orchestrator.wake_up()
    assert computed_by(engine, PROMPT) == N, "keys and values were kept, and so was the prefix"
    engine.orchestrator.sleep(2)
    engine.orchestrator.wake_up()
    assert not engine.kv_cache.values.any()
    assert engine.generate(PROMPT, N) == tokens
    engine.close()


# Files and requests that do not fit


def test_half_precision_weights_sleep_too(weights_path: Path) -> None:
    path = weights_path
    create_weights(path, SMALL)
    halves = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    (path.parent / "config.json").write_text('{"num_attention_heads": 4}')
    save_file(halves, path)
    engine = TinyEngine(HostBackend(), path)
    tokens = engine.generate(PROMPT, N)
    assert engine.kv_cache.keys.dtype == torch.bfloat16
    engine.orchestrator.sleep(1)
    engine.orchestrator.wake_up()
    assert engine.generate(PROMPT, N) == tokens
    engine.close()


@pytest.mark.parametrize(
    ("prompt", "n"), [([], 1), ([61], 1), ([-1], 1), ([1], -1), ([1] * CAPACITY, 2)]
)
def test_a_request_that_does_not_fit_is_refused(
    prompt: list[int], n: int, engine: TinyEngine
) -> None:
    with pytest.raises(RequestError):
        engine.generate(prompt, n)
    assert engine.computed_positions == 0
    assert len(engine.generate([1] * CAPACITY, 1)) == 1, "the largest that fits"


def test_what_cannot_be_served_allocates_nothing(weights_path: Path) -> None:
    backend = HostBackend()
    with pytest.raises(RequestError, match="no room for one position"):
        TinyEngine(backend, weights_path, kv_bytes=SMALL.position_bytes - 1)
    weights_path.write_bytes(weights_path.read_bytes()[:-1])
    with pytest.raises(WeightsFileError):
        TinyEngine(backend, weights_path)
    assert backend.state().mapped_bytes == 0
    backend.close()


def test_a_backend_without_allocations_is_refused(weights_path: Path) -> None:
    backend: Any = SimpleNamespace(name="whole-process", capabilities=Capabilities())
    with pytest.raises(UnsupportedOperationError, match="whole-process"):
        TinyEngine(backend, weights_path)


def test_close_gives_everything_back(weights_path: Path) -> None:
    backend = HostBackend()
    engine = TinyEngine(backend, weights_path)
    engine.generate(PROMPT, N)
    assert backend.state().mapped_bytes > SMALL.weights_bytes
    engine.close()
    engine.close()
    assert backend.state().mapped_bytes == 0
    with pytest.raises(SuspendedError):
        engine.generate(PROMPT, N)
