"""Work that was recorded with addresses, and what the engine has to rebuild after a sleep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sleepbackends.orchestrator import Orchestrator
from sleepbackends.testing.contract.fixtures import Contents, ContractFixtures
from sleepbackends.testing.engine import FakeEngine
from sleepbackends.testing.memory import RecordingMemory
from sleepbackends.testing.promises import Promise, proves

_SIZE = 3 * 4096 + 17


class GraphTests(ContractFixtures):
    """What ``preserves_addresses`` and the flags about what an engine has captured promise."""

    @proves(Promise.ADDRESSES)
    def test_addresses_are_what_they_were(self, backend: Any) -> None:
        """Whatever a sleep did with the contents."""
        self.need(backend, "preserves_addresses")
        contents = self.populate(backend, "weights", "kv_cache")
        before = [memory.address for memory in contents]
        for level in (self.keeping_level(backend), 2):
            backend.suspend(level)
            backend.resume()
            now = [memory.address for memory in contents]
            assert now == before, (
                f"after suspend({level}) memory that was at {before} came back at {now}"
            )

    @proves(Promise.GRAPHS)
    def test_recorded_work_runs_again(self, backend: Any) -> None:
        """A copy that was recorded before a sleep does the same afterwards."""
        self.need(backend, "preserves_addresses")
        contents, replay = self._record(backend)
        source, target = contents
        for level in (self.keeping_level(backend), 2):
            backend.suspend(level)
            backend.resume()
            data = bytes([level]) * _SIZE
            source.write(data)
            replay()
            self.check({source: data, target: data})

    @proves(Promise.GRAPHS)
    def test_recorded_work_runs_again_after_a_release(self, backend: Any) -> None:
        """Work on what stayed resident runs while another tag is released."""
        self.need(backend, "preserves_addresses", "supports_selective_release")
        contents, replay = self._record(backend)
        source, target = contents
        self.populate(backend, "kv_cache")
        backend.discard(["kv_cache"])
        source.write(b"\x11" * _SIZE)
        replay()
        self.check(dict.fromkeys((source, target), b"\x11" * _SIZE))

    @proves(Promise.GRAPHS)
    def test_the_engine_rebuilds_what_does_not_survive(self, backend: Any) -> None:
        """Each ``preserves_...`` flag that is False has the engine rebuild, and no other."""
        engine, can = FakeEngine(), backend.capabilities
        self.populate(backend, "kv_cache")
        orchestrator = Orchestrator(backend, hooks=engine.hooks())
        orchestrator.sleep(1)
        orchestrator.wake_up()
        graphs = can.preserves_addresses and can.preserves_graphs_with_communicators
        rebuilt = engine.named()
        for hook, survived in (
            ("teardown_communicators", can.preserves_communicators),
            ("rebuild_communicators", can.preserves_communicators),
            ("recompile", can.preserves_compiled_artifacts),
            ("recapture_graphs", graphs),
        ):
            assert (hook in rebuilt) != survived, f"{can}, and {rebuilt} were called"
        assert backend.capabilities == can, f"it said {can}, and {backend.capabilities} afterwards"

    def _record(self, backend: Any) -> tuple[Contents, Callable[[], None]]:
        source = self.allocate(backend, "weights", _SIZE)
        target = self.allocate(backend, "weights", _SIZE)
        if not isinstance(target, RecordingMemory):
            pytest.skip(f"{type(target).__name__} has no record_copy()")
        source.write(b"\x01" * _SIZE)
        target.write(bytes(_SIZE))
        replay = target.record_copy(source)
        replay()
        assert target.read() == b"\x01" * _SIZE, "record_copy() does not copy"
        return {source: b"\x01" * _SIZE, target: b"\x01" * _SIZE}, replay
