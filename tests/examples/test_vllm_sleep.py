"""The example for vLLM, without vLLM: it says so, and it notices when a step goes wrong."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_sleep.py"


@pytest.fixture
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


class Engine:
    """As much of an engine as the example calls."""

    def __init__(self, kv_bytes: int) -> None:
        self.kv_bytes = kv_bytes
        self.free = 10 * kv_bytes
        self.forgets_at = ""
        self.releases = True
        self.tokens = [[1, 2], [3]]
        self.calls: list[str] = []

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.forgets_at:
            self.tokens = [[1, 2], [4]]

    def sleep(self, level: int) -> None:
        self._note(f"sleep {level}")
        if level and self.releases:
            self.free += self.kv_bytes

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._note(f"wake_up {tags}")
        if tags in (None, ["kv_cache"]):
            self.free = 10 * self.kv_bytes

    def reset_prefix_cache(self) -> bool:
        return True

    def collective_rpc(self, method: str, **_: Any) -> list[Any]:
        self._note(method)
        if method == "discard" and self.releases:
            self.free += self.kv_bytes
        if method == "wake_up":
            self.free = 10 * self.kv_bytes
        return [{"backend": "cumem", "last": {"seconds": 0.5}}]


@pytest.fixture
def engine(example: dict[str, Any]) -> Engine:
    return Engine(example["KV_BYTES"])


def check(example: dict[str, Any], engine: Engine) -> int:
    code: int = example["check"](engine, lambda llm: llm.tokens, lambda: engine.free)
    return code


def test_an_engine_that_keeps_its_promises(example: dict[str, Any], engine: Engine) -> None:
    assert check(example, engine) == 0
    assert engine.calls.count("sleep 1") == 4
    assert "wake_up ['kv_cache']" in engine.calls
    assert "discard" in engine.calls


@pytest.mark.parametrize(
    "call", ["sleep 1", "wake_up None", "wake_up ['weights']", "discard", "wake_up"]
)
def test_other_tokens_are_noticed(example: dict[str, Any], engine: Engine, call: str) -> None:
    engine.forgets_at = call
    assert check(example, engine) == 1


def test_memory_that_is_not_given_back_is_noticed(example: dict[str, Any], engine: Engine) -> None:
    engine.releases = False
    assert check(example, engine) == 1


def test_without_vllm_it_says_what_to_install(
    example: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    main = example["main"]
    main.__globals__["find_spec"] = lambda _: None
    assert main([]) == 2
    assert "pip install vllm" in capsys.readouterr().out
