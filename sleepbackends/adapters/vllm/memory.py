"""The memory of one vLLM worker: an orchestrator over our backend, by vLLM's tags."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sleepbackends.adapters.vllm.status import describe, sentence
from sleepbackends.config import SleepConfig
from sleepbackends.cumem.accelerator import CUDA
from sleepbackends.engine_state import EngineReport
from sleepbackends.errors import (
    SleepBackendsError,
    SuspendedError,
    UnsupportedOperationError,
)
from sleepbackends.orchestrator import Orchestrator
from sleepbackends.policies import Policies, Policy, TagPolicy, check_level
from sleepbackends.selection import open_backend
from sleepbackends.state import check_tags

logger = logging.getLogger("vllm.sleepbackends")

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
CUDA_GRAPHS = "cudagraph"

DEFERRABLE = (WEIGHTS, KV_CACHE)
"""What a wake-up of other tags leaves asleep; vLLM relies on all else being there."""

_PROBE_BYTES = 1 << 20
_ALL_GRAPHS = (0x5B, 0x5B)
"""Graphs captured under one name share a pool, as vLLM's own captures do."""


class Memory:
    """What one worker allocates under tags, put to sleep and woken as vLLM asks.

    Every call goes through an orchestrator, so a release works on any backend and a wake-up
    without room changes nothing.

    Parameters
    ----------
    orchestrator : Orchestrator
        Over a backend that owns what torch allocates. Closed with this object.
    """

    def __init__(self, orchestrator: Orchestrator) -> None:
        self.orchestrator = orchestrator
        self.last: EngineReport | None = None
        """What the last call did."""
        self.closed = False
        self._foreign_bytes = 0

    @classmethod
    def open(cls, config: SleepConfig) -> Memory:
        """Create the backend that the configuration selects, and try it.

        Raises
        ------
        SleepBackendsError
            If there is none, it cannot work here, or what torch allocates does not reach it;
            nothing is left behind.
        """
        memory = cls(Orchestrator(open_backend(config).backend, config=config))
        try:
            memory._try()
        except BaseException:
            memory.close()
            raise
        return memory

    def _try(self) -> None:
        """See that what torch allocates in a region arrives, and make vLLM's tags known."""
        backend: Any = self.orchestrator.backend
        torch = CUDA.import_torch()
        arrived = False
        if hasattr(backend, "region"):
            for tag in DEFERRABLE:
                with backend.region(tag):
                    piece = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="cuda")
                    arrived = tag in backend.state().tags and self._total_bytes() > 0
                    del piece
        if not arrived:
            raise UnsupportedOperationError(
                f"what torch allocates on the GPU does not reach the backend {backend.name!r}",
                hint="choose one that owns CUDA memory: SLEEPBACKENDS_BACKEND=cumem",
                backend=backend.name,
            )
        self._foreign_bytes = self._total_bytes()

    # Allocating

    def region(self, tag: str) -> AbstractContextManager[Any]:
        """Let what torch allocates in this thread carry the tag, until the scope ends."""
        backend: Any = self.orchestrator.backend
        scope: AbstractContextManager[Any] = backend.region(tag)
        return scope

    @property
    def has_graph_pool(self) -> bool:
        """Whether captured graphs can have their memory here."""
        return hasattr(self.orchestrator.backend, "graph_pool")

    @contextmanager
    def graph_pool(self) -> Iterator[tuple[int, int]]:
        """Give the pool for captured graphs, which all of them share.

        Raises
        ------
        UnsupportedOperationError
            If the backend has none; see ``has_graph_pool``.
        SuspendedError
            If graphs captured earlier are asleep: new ones would share memory with them that
            is not there.
        """
        backend: Any = self.orchestrator.backend
        if not self.has_graph_pool:
            raise UnsupportedOperationError(
                f"the backend {backend.name!r} has no pool for captured graphs",
                hint="leave sleep_mode_offload_cudagraph off",
                backend=backend.name,
            )
        with backend.graph_pool(CUDA_GRAPHS, shared_as=_ALL_GRAPHS) as pool_id:
            if CUDA_GRAPHS in backend.state().asleep_tags():
                raise SuspendedError(
                    "graphs cannot be captured while those captured earlier are asleep",
                    hint="wake_up() first",
                    tags=[CUDA_GRAPHS],
                )
            yield pool_id

    @property
    def usage_bytes(self) -> int:
        """Bytes allocated under all tags, asleep or not."""
        return max(0, self._total_bytes() - self._foreign_bytes)

    def _total_bytes(self) -> int:
        tags = self.orchestrator.backend.state().tags.items()
        process = self._process_tags()
        return sum(tag.total_bytes for name, tag in tags if name not in process)

    # The process itself, where the backend takes that as well

    @property
    def takes_process(self) -> bool:
        """Whether the backend takes all that the process holds, not only what has a tag."""
        return bool(self._process_tags())

    def _process_tags(self) -> frozenset[str]:
        inner: Any = getattr(self.orchestrator.backend, "inner", None)
        return frozenset(inner.state().tags) if inner is not None else frozenset()

    def _process_asleep(self) -> bool:
        return bool(self.orchestrator.backend.state().context_released)

    def sleep_process(self, level: int) -> None:
        """Put the process to sleep as well, if the configuration asks for it at that level.

        Apart from ``sleep``, because vLLM asks the device how much is free after that. Where it
        cannot be put to sleep, one line says why, and what has a tag is asleep all the same.

        Raises
        ------
        SleepBackendsError
            If the process is asleep and cannot be woken any more.
        """
        backend, policies = self.orchestrator.backend, self.orchestrator.config.tag_policies
        chosen = {}
        for name, tag in backend.state().tags.items():
            kept = Policy.DISCARD if tag.discarded_bytes else Policy.KEEP
            wanted = Policy.OFFLOAD if tag.offloaded_bytes else kept
            chosen[name] = TagPolicy(wanted, wanted)
        for name in self._process_tags():
            if name in policies.declared:
                chosen[name] = policies.of(name)
            else:
                del chosen[name]  # as the backend's depth says
        try:
            self._noted(self.orchestrator.sleep(level, policies=Policies(chosen)))
        except SleepBackendsError as error:
            if self._process_asleep():
                raise
            logger.warning("the process stays awake, its tags sleep: %s", error)

    def wake_process(self) -> None:
        """Wake the process alone, if it is asleep: whatever uses the device needs that first.

        Raises
        ------
        SleepBackendsError
            As ``Orchestrator.wake_up``: everything is still asleep.
        """
        if self._process_asleep():
            self._noted(self.orchestrator.wake_up(self._process_tags()))

    # Sleeping and waking

    def sleep(self, level: int) -> EngineReport:
        """Release memory by our configuration's policies.

        What is asleep already stays as it is.

        Raises
        ------
        SleepBackendsError
            As ``Orchestrator.sleep``.
        """
        check_level(level)
        policies = self.orchestrator.config.tag_policies
        return self._sleep(level, lambda tag: policies.at(tag, level))

    def sleep_keeping(self, tags: Collection[str]) -> EngineReport:
        """Keep the contents of the named tags and drop those of all others.

        What the configuration keeps resident stays so, and what is asleep already stays as
        it is.

        Raises
        ------
        SleepBackendsError
            As ``Orchestrator.sleep``.
        """
        policies = self.orchestrator.config.tag_policies

        def policy(tag: str) -> Policy:
            if policies.at(tag, 1) is Policy.KEEP:
                return Policy.KEEP
            return Policy.OFFLOAD if tag in tags else Policy.DISCARD

        return self._sleep(1, policy)

    def _sleep(self, level: int, policy: Callable[[str], Policy]) -> EngineReport:
        chosen = {}
        self.wake_process()
        process = self._process_tags()
        for name, tag in self.orchestrator.backend.state().tags.items():
            wanted = Policy.KEEP if name in process else policy(name)
            if tag.asleep_bytes and not tag.mapped_bytes and wanted is not Policy.KEEP:
                asleep = Policy.OFFLOAD if tag.offloaded_bytes else Policy.DISCARD
                if asleep is not wanted:
                    logger.warning("%s is asleep already and stays %sed", name, asleep.value)
                wanted = asleep
            chosen[name] = TagPolicy(wanted, wanted)
        _give_back_cached()
        return self._noted(self.orchestrator.sleep(level, policies=Policies(chosen)))

    def waking(self, tags: Collection[str] | None) -> frozenset[str]:
        """Return which of the tags that are asleep a wake-up of the named ones brings back.

        Tags that nobody may leave asleep come along, and so does everything where the
        backend cannot do otherwise.

        Raises
        ------
        UnknownTagError
            If there is no such tag.
        """
        state = self.orchestrator.backend.state()
        asleep = state.asleep_tags()
        if tags is None:
            return asleep
        wanted = check_tags(tags, state.tags, "wake_up")
        waking = asleep & (wanted | (asleep - set(DEFERRABLE)))
        selective = self.orchestrator.capabilities.supports_selective_resume
        return waking if selective or not waking else asleep

    def wake_up(self, tags: Collection[str] | None = None) -> EngineReport:
        """Take memory again for the named tags, and what ``waking`` says comes along.

        Raises
        ------
        SleepBackendsError
            As ``Orchestrator.wake_up``: everything is still asleep, and the call can be
            repeated.
        """
        waking = self.waking(tags)
        self.wake_process()
        _give_back_cached()
        return self._noted(self.orchestrator.wake_up(waking))

    def release(self, tags: Collection[str]) -> EngineReport:
        """Release the named tags and forget their contents, by whatever the backend can do.

        Raises
        ------
        SleepBackendsError
            As ``Orchestrator.release``.
        """
        self.wake_process()
        return self._noted(self.orchestrator.release(tags))

    def mark_valid(self, tags: Collection[str]) -> None:
        """Say that the contents of these tags were loaded again.

        Raises
        ------
        SleepBackendsError
            As ``Orchestrator.mark_valid``.
        """
        self.orchestrator.mark_valid(tags)

    def status(self) -> dict[str, Any]:
        """Tell what is where and what the last call did, in plain types."""
        return describe(self.orchestrator, self.last)

    def close(self) -> None:
        """Give back what the backend holds for itself; what is mapped stays usable."""
        self.closed = True
        self.orchestrator.close()

    def _noted(self, report: EngineReport) -> EngineReport:
        self.last = report
        level = logging.WARNING if report.degraded else logging.INFO
        logger.log(level, "%s", sentence(report))
        return report


def _give_back_cached() -> None:
    """Have torch release what it only keeps for later, in ended regions as well."""
    CUDA.import_torch().cuda.empty_cache()
