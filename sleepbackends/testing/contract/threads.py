"""Transitions from several threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sleepbackends.control import Control
from sleepbackends.errors import BusyError
from sleepbackends.residency import Residency
from sleepbackends.testing.contract.fixtures import ContractFixtures


class ThreadTests(ContractFixtures):
    """Transitions are serialised; looking never waits; freeing never waits."""

    def test_many_resumes_are_one(self, backend: Any) -> None:
        """Of several threads that resume at once one does the work and all succeed."""
        contents = self.populate(backend, "weights")
        backend.suspend(1 if backend.capabilities.supports_offload else 2)
        with ThreadPoolExecutor(8) as pool:
            changed = list(pool.map(lambda _: backend.resume().changed, range(8)))
        assert sorted(changed) == [False] * 7 + [True]
        if backend.capabilities.supports_offload:
            self.check(contents)

    def test_a_transition_in_progress(self, backend: Any) -> None:
        """State answers at once, frees are deferred, and a deadline names the holder."""
        kept = self.populate(backend, "kv_cache")
        extra = self.allocate(backend, "kv_cache", 4097)
        inside, go_on = threading.Event(), threading.Event()
        real = backend.synchronize

        def slow(blocks: Any) -> None:
            inside.set()
            assert go_on.wait(60)
            real(blocks)

        backend.synchronize = slow
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(backend.suspend, 1)
            assert inside.wait(60)
            started = time.perf_counter()
            assert backend.state().mapped_bytes > 0
            extra.free()
            assert time.perf_counter() - started < 1.0
            with pytest.raises(BusyError, match="suspend") as caught:
                backend.resume(control=Control(timeout_s=0.05))
            assert caught.value.holders
            go_on.set()
            assert running.result(60).changed
        del backend.synchronize
        assert self.residency(backend, "kv_cache") is Residency.DISCARDED
        assert backend.state().tags["kv_cache"].blocks == len(kept)

    def test_freeing_and_allocating_meanwhile(self, backend: Any) -> None:
        """Blocks come and go while others sleep and wake; the ledger ends true."""
        kept = self.populate(backend, "weights") if backend.capabilities.supports_offload else {}
        stop = threading.Event()

        def churn() -> int:
            done = 0
            while not stop.is_set():
                memory = self.allocate(backend, "lora", 4096 + done)
                memory.free()
                done += 1
            return done

        level = 1 if backend.capabilities.supports_offload else 2
        with ThreadPoolExecutor(2) as pool:
            churning = [pool.submit(churn) for _ in range(2)]
            try:
                for _ in range(20):
                    backend.suspend(level)
                    backend.resume()
            finally:
                stop.set()
            assert all(result.result(60) for result in churning)
        self.check(kept)
        tags = backend.state().tags
        assert tags["lora"].blocks == 0
        assert sum(tag.blocks for tag in tags.values()) == len(kept)
