"""Transitions from several threads."""

from __future__ import annotations

import concurrent.futures
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from sleepbackends.control import Control
from sleepbackends.errors import BusyError
from sleepbackends.residency import Residency
from sleepbackends.testing.contract.fixtures import ContractFixtures
from sleepbackends.testing.faults import hold_step
from sleepbackends.testing.promises import Promise, proves

T = TypeVar("T")

AT_ONCE_S = 5.0
_IN_THE_END_S = 60.0


class ThreadTests(ContractFixtures):
    """Transitions are serialised; looking never waits; freeing never waits."""

    @proves(Promise.SERIALISED)
    def test_many_resumes_are_one(self, backend: Any) -> None:
        """Of several threads that resume at once one does the work and all succeed."""
        self.assume("many_threads")
        contents = self.populate(backend, "weights")
        backend.suspend(self.keeping_level(backend))
        with ThreadPoolExecutor(8) as pool:
            changed = list(pool.map(lambda _: backend.resume().changed, range(8)))
        did = sum(changed)
        assert did == 1, f"8 threads resumed at once; {did} of them say that they changed something"
        if backend.capabilities.supports_offload:
            self.check(contents)

    @proves(Promise.SERIALISED)
    def test_a_transition_in_progress(self, backend: Any) -> None:
        """State answers at once, frees are deferred, and a deadline names the holder."""
        self.assume("many_threads", "one_block_each")
        self.need_steps(backend)
        kept = self.populate(backend, "kv_cache")
        extra = self.allocate(backend, "kv_cache", 4097)
        before = backend.state()
        # Whatever fails inside, the step is let go before the pool waits for its threads.
        with ThreadPoolExecutor(4) as pool, hold_step(backend, "synchronize") as held:
            running = pool.submit(backend.suspend, 1)
            assert held.wait_until_entered(), "suspend did not call synchronize"
            state = _soon(pool.submit(backend.state), Promise.NEVER_WAITS, "state()")
            Promise.DERIVED_STATE.check(
                state == before,
                f"nothing has happened yet, and the state was {before} and is {state}",
            )
            _soon(pool.submit(extra.free), Promise.FREEING, "free()")
            other = pool.submit(backend.resume, control=Control(timeout_s=0.05))
            concurrent.futures.wait([other], _IN_THE_END_S)
            error = other.exception(0)
            assert isinstance(error, BusyError), (
                "while a suspend was going on, resume() with a deadline "
                + (f"raised {error!r}" if error else "began too, and did not raise BusyError")
            )
            assert "suspend" in str(error), f"the error does not name who is in the way: {error}"
            assert error.holders, "the error has no holders"
            held.let_go()
            assert running.result(_IN_THE_END_S).changed, "the suspend says that nothing changed"
        self.check_residency(
            backend, Promise.DERIVED_STATE, "that suspend", kv_cache=Residency.DISCARDED
        )
        blocks = backend.state().tags["kv_cache"].blocks
        Promise.FREEING.check(
            blocks == len(kept), f"what was freed meanwhile is still there: {blocks} blocks"
        )

    @proves(Promise.FREEING)
    def test_freeing_and_allocating_meanwhile(self, backend: Any) -> None:
        """Blocks come and go while others sleep and wake; the ledger ends true."""
        self.assume("many_threads", "allocates_asleep", "frees_at_once")
        level = self.keeping_level(backend)
        kept = self.populate(backend, "weights") if level == 1 else {}
        # A tag that every sleep drops, where it could not be saved.
        tag = "lora" if level == 1 else "kv_cache"
        stop = threading.Event()

        def churn() -> int:
            done = 0
            while not stop.is_set():
                memory = self.allocate(backend, tag, 4096 + done)
                memory.free()
                done += 1
            return done

        with ThreadPoolExecutor(2) as pool:
            churning = [pool.submit(churn) for _ in range(2)]
            try:
                for _ in range(20):
                    backend.suspend(level)
                    backend.resume()
            finally:
                stop.set()
            assert all(result.result(_IN_THE_END_S) for result in churning)
        self.check(kept)
        tags = backend.state().tags
        left = sum(each.blocks for each in tags.values()) - len(kept)
        assert left == 0, f"{left} blocks that were freed are still there"


def _soon(future: Future[T], promise: Promise, call: str) -> T:
    done, _ = concurrent.futures.wait([future], AT_ONCE_S)
    promise.check(done, f"{call} had not returned after {AT_ONCE_S} s while a suspend was going on")
    return future.result(0)
