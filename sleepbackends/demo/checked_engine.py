"""One engine on one backend: every step it can take, and what is checked after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from sleepbackends import (
    AllocatingBackend,
    EngineReport,
    Progress,
    Residency,
    SleepConfig,
    SuspendedError,
)
from sleepbackends.demo.observe import addresses, checksum
from sleepbackends.demo.steps import PlannedRelease, Step
from sleepbackends.examples.tiny_engine import TinyEngine

ENOUGH = 0.95
"""The part of the memory given back that has to be missing from the measured figure."""

# A KV cache is small beside what libraries keep of the memory that they use for the first
# time, while a backend saves and restores everything around it.
_KEPT_BY_LIBRARIES_BYTES = 8 << 20
_PROMPT_LENGTH = 32
_MIB = 1 << 20


@dataclass(frozen=True)
class DemoSettings:
    """What every engine of the demo needs.

    Parameters
    ----------
    weights_path : Path
        A Llama-style safetensors file.
    kv_bytes : int
        Size of the KV cache, at most.
    n_tokens : int
        How many tokens each generation adds to the prompt.
    config : SleepConfig
        For the orchestrator.
    measure : callable
        Returns the bytes in use of the memory that the backend gives back.
    on_progress : callable
        Told how far each transition has come.
    enough : float
        The part of what a sleep gives back that has to be missing from the measured figure;
        less where saved bytes stay in the measured memory, as compressed ones do.
    """

    weights_path: Path
    kv_bytes: int
    n_tokens: int
    config: SleepConfig
    measure: Callable[[], int]
    on_progress: Callable[[Progress], None]
    enough: float = ENOUGH


class CheckedEngine:
    """Takes an engine through its steps and checks it after each.

    Parameters
    ----------
    settings : DemoSettings
        How to run and what to tell.
    backend : AllocatingBackend
        Where the engine's memory comes from; closed by ``close``.
    tokens : list of int, optional
        What the same model generated elsewhere.

    Raises
    ------
    SleepBackendsError
        As ``TinyEngine`` raises it.
    """

    def __init__(
        self, settings: DemoSettings, backend: AllocatingBackend, tokens: list[int] | None = None
    ) -> None:
        self._settings = settings
        self._before_bytes = settings.measure()
        started = time.perf_counter()
        self.engine = TinyEngine(
            backend, settings.weights_path, kv_bytes=settings.kv_bytes, config=settings.config
        )
        self._load_seconds = time.perf_counter() - started
        vocab_size = self.engine.model_config.vocab_size
        self._prompt = [(7919 * i + 11) % vocab_size for i in range(_PROMPT_LENGTH)]
        self.tokens = tokens or []
        self._checksum = checksum(self.engine.weights.values())
        self._addresses = addresses(self._tensors)
        self._embedding = ""

    def close(self) -> None:
        """Give all memory back."""
        self.engine.close()

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensor in self.engine.weights.values())

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache."""
        return self.engine.kv_cache.keys.nbytes + self.engine.kv_cache.values.nbytes

    # Steps

    def loaded(self) -> Step:
        """Tell of the loading, and compare the weights with what another reader finds."""
        after_bytes = self._settings.measure()
        with safe_open(self._settings.weights_path, framework="pt") as file:
            in_file = checksum(file.get_tensor(name) for name in self.engine.weights)
        wrong = [] if in_file == self._checksum else ["the weights are not those of the file"]
        return self._step("load", self._before_bytes, after_bytes, self._load_seconds, wrong)

    def generate(self, name: str = "generate") -> Step:
        """Generate tokens; the first ones are what all later ones are compared with."""
        before_bytes = self._settings.measure()
        started = time.perf_counter()
        tokens = self.engine.generate(self._prompt, self._settings.n_tokens)
        seconds = time.perf_counter() - started
        self.tokens = self.tokens or tokens
        self._embedding = checksum([self.engine.embed(self._prompt)])
        wrong = [*self._compared(tokens), *self._weights_differ()]
        return self._step(name, before_bytes, self._settings.measure(), seconds, wrong)

    def sleep(self, level: int) -> Step:
        """Sleep; most of the memory of weights and KV cache has to be gone."""
        before_bytes = self._settings.measure()
        report = self.engine.orchestrator.sleep(level, on_progress=self._settings.on_progress)
        after_bytes = self._settings.measure()
        expected_bytes = self.weights_bytes + self.kv_bytes
        enough = self._settings.enough if level == 1 else ENOUGH
        wrong = list(_fell_short(before_bytes - after_bytes, enough * expected_bytes))
        wrong += self._serves_asleep()
        return self._told(f"sleep level {level}", before_bytes, after_bytes, report, wrong)

    def wake_up(self, name: str = "wake up and generate") -> Step:
        """Wake up; everything has to be as it was, except that the KV cache is empty."""
        before_bytes = self._settings.measure()
        report = self.engine.orchestrator.wake_up(on_progress=self._settings.on_progress)
        after_bytes = self._settings.measure()
        wrong = [*self._weights_differ(), *self._kv_cache_holds_something()]
        wrong += self._compared(self.engine.generate(self._prompt, self._settings.n_tokens))
        return self._told(name, before_bytes, after_bytes, report, wrong)

    def release_kv_cache(self) -> Iterator[PlannedRelease | Step]:
        """Say how the KV cache would be released, release it, and compute on the weights."""
        orchestrator = self.engine.orchestrator
        plan = orchestrator.plan_release()
        yield PlannedRelease(orchestrator.backend.name, plan)
        before_bytes = self._settings.measure()
        report = orchestrator.release_kv_cache(on_progress=self._settings.on_progress)
        after_bytes = self._settings.measure()
        fell_bytes = before_bytes - after_bytes
        wrong = list(_fell_short(fell_bytes, ENOUGH * self.kv_bytes - _KEPT_BY_LIBRARIES_BYTES))
        wrong += self._serves_asleep()
        if (report.strategy, report.degraded) != (plan.strategy, plan.degraded):
            wrong.append(f"planned was {plan.strategy}, done was {report.strategy}")
        if report.tags["kv_cache"].after.residencies != {Residency.DISCARDED}:
            wrong.append("the KV cache was not released")
        wrong += self._serves_weights_asleep() if report.degraded else self._weights_serve()
        step = self._told("release the KV cache", before_bytes, after_bytes, report, wrong)
        yield replace(step, planned=plan.strategy)

    # Checks: each yields what is not as it has to be

    def _compared(self, tokens: list[int]) -> Iterator[str]:
        if tokens != self.tokens:
            yield f"generated {tokens}, at first it was {self.tokens}"

    def _weights_differ(self) -> Iterator[str]:
        if checksum(self.engine.weights.values()) != self._checksum:
            yield "the weights are not what was loaded"
        capabilities = self.engine.orchestrator.capabilities
        if capabilities.preserves_addresses and addresses(self._tensors) != self._addresses:
            yield "the addresses changed"

    def _kv_cache_holds_something(self) -> Iterator[str]:
        if self.engine.kv_cache.keys.any() or self.engine.kv_cache.values.any():
            yield "the KV cache was not reset"

    def _weights_serve(self) -> Iterator[str]:
        yield from self._weights_differ()
        if checksum([self.engine.embed(self._prompt)]) != self._embedding:
            yield "the embedding differs while the KV cache is released"

    def _serves_asleep(self) -> Iterator[str]:
        with ThreadPoolExecutor(1) as other:
            error = other.submit(self.engine.generate, self._prompt, 1).exception()
        if not isinstance(error, SuspendedError):
            yield f"a request was not refused while its memory was released: {error!r}"

    def _serves_weights_asleep(self) -> Iterator[str]:
        try:
            self.engine.embed(self._prompt)
        except SuspendedError:
            return
        yield "weights were used while they were not resident"

    # Helpers

    @property
    def _tensors(self) -> list[Tensor]:
        cache = self.engine.kv_cache
        return [*self.engine.weights.values(), cache.keys, cache.values]

    def _told(
        self, name: str, before_bytes: int, after_bytes: int, report: EngineReport, wrong: list[str]
    ) -> Step:
        step = self._step(name, before_bytes, after_bytes, report.seconds, wrong)
        return replace(
            step, degraded=report.degraded, strategy=report.strategy, reason=report.reason
        )

    def _step(
        self, name: str, before_bytes: int, after_bytes: int, seconds: float, wrong: list[str]
    ) -> Step:
        return Step(
            name=name,
            backend=self.engine.orchestrator.backend.name,
            before_bytes=before_bytes,
            after_bytes=after_bytes,
            seconds=seconds,
            differences=tuple(wrong),
        )


def _fell_short(fell_bytes: int, least_bytes: float) -> Iterator[str]:
    if fell_bytes < least_bytes:
        yield (
            f"memory fell by {fell_bytes / _MIB:.1f} MiB, which is less than the "
            f"{least_bytes / _MIB:.1f} MiB that were to be missing at least"
        )
