"""A fault at each step of each transition: what is promised then."""

from __future__ import annotations

from typing import Any

import pytest

from sleepbackends.base import BaseBackend
from sleepbackends.errors import HostMemoryError, MechanismError, NoRoomError, SleepBackendsError
from sleepbackends.residency import Residency
from sleepbackends.testing.contract.fixtures import SIZES, ContractFixtures
from sleepbackends.testing.faults import STEPS, FaultInjector

_MOST_CALLS = 8
_LARGE = 8 << 20
"""Large enough to be seen in what the system says this process uses."""


class FaultTests(ContractFixtures):
    """Nothing lost, nothing half-awake, and the same call works afterwards."""

    @pytest.mark.parametrize("step", STEPS)
    def test_suspend(self, step: str) -> None:
        """A failed suspend changed nothing, or dropped only what it may drop, and says so."""
        fired = 0
        for call in range(_MOST_CALLS):
            with self.opened() as backend:
                self.need(backend, "supports_offload")
                contents = self.populate(backend)
                fired += self._suspend_with_fault(backend, contents, step, call)
        if step in ("synchronize", "check_room_to_save", "save", "unmap"):
            assert fired, f"{step} was never called by suspend"

    def _suspend_with_fault(
        self, backend: BaseBackend[Any], contents: dict[Any, bytes], step: str, call: int
    ) -> int:
        kv_cache = {m: b for m, b in contents.items() if len(b) in SIZES["kv_cache"]}
        kept = {m: b for m, b in contents.items() if m not in kv_cache}
        with FaultInjector(backend, {step: [call]}) as injector:
            failed = self._fails(lambda: backend.suspend(1), injector, backend)
        if not failed:
            assert backend.state().mapped_bytes == 0
            backend.resume()
            self.check(kept)
            return 0
        if self.residency_or_none(backend, "kv_cache") is Residency.RESIDENT:
            self.check(contents)
            assert not backend.state().unusable_tags()
        else:
            # Dropping had begun: everything kept is safe, and the call can be finished.
            assert backend.state().tags["kv_cache"].discarded_bytes > 0
        backend.suspend(1)
        assert backend.state().mapped_bytes == 0
        backend.resume()
        self.check(kept)
        return 1

    @pytest.mark.parametrize("step", STEPS)
    def test_resume(self, step: str) -> None:
        """A failed resume leaves everything asleep with its bytes safe."""
        fired = 0
        for call in range(_MOST_CALLS):
            with self.opened() as backend:
                self.need(backend, "supports_offload")
                contents = self.populate(backend, "weights", "kv_cache", "lora")
                kept = {m: b for m, b in contents.items() if len(b) not in SIZES["kv_cache"]}
                if self.used_bytes(backend) is not None:
                    large = self.allocate(backend, "weights", _LARGE)
                    kept[large] = b"\x3c" * _LARGE
                    large.write(kept[large])
                backend.suspend(1)
                asleep, used_before = backend.state(), self.used_bytes(backend)
                with FaultInjector(backend, {step: [call]}) as injector:
                    failed = self._fails(backend.resume, injector, backend)
                if failed:
                    fired += 1
                    assert backend.state() == asleep, "a failed resume left something awake"
                    used = self.used_bytes(backend)
                    if used is not None and used_before is not None:
                        assert used - used_before < _LARGE // 2, "memory was left mapped"
                    backend.resume()
                self.check(kept)
        if step in ("reserve", "map", "restore", "fill"):
            assert fired, f"{step} was never called by resume"

    @pytest.mark.parametrize("step", ["synchronize", "unmap"])
    def test_discard(self, step: str) -> None:
        """A failed discard says what is where, leaves the rest alone and can be repeated."""
        for call in range(2):
            with self.opened() as backend:
                self.need(backend, "supports_selective_release")
                kept = self.populate(backend, "weights")
                self.populate(backend, "kv_cache")
                with FaultInjector(backend, {step: [call]}) as injector:
                    failed = self._fails(
                        lambda b=backend: b.discard(["kv_cache"]), injector, backend
                    )
                gone = backend.state().tags["kv_cache"]
                assert failed == (gone.resident_bytes > 0)
                assert gone.epoch == (1 if gone.discarded_bytes else 0)
                assert backend.discard(["kv_cache"]).changed == failed
                assert self.residency(backend, "kv_cache") is Residency.DISCARDED
                self.check(kept)

    @pytest.mark.parametrize("undo", ["map", "restore", "reserve", "unmap"])
    def test_a_fault_while_undoing(self, undo: str) -> None:
        """When undoing fails as well, the bytes are still safe and the state still true."""
        with self.opened() as backend:
            self.need(backend, "supports_offload")
            kept = self.populate(backend, "weights", "lora")
            faults = {"save": [2], undo: [0, 1, 2]} if undo != "unmap" else {"unmap": [2, 3]}
            with FaultInjector(backend, faults) as injector:
                assert self._fails(lambda: backend.suspend(1), injector, backend)
            backend.suspend(1)
            with FaultInjector(backend, {"restore": [1], "unmap": [0, 2]}) as injector:
                assert self._fails(backend.resume, injector, backend)
            assert not any(tag.resident_bytes for tag in backend.state().tags.values())
            if undo == "map":
                # What is mapped with its copy still owed goes back to sleep uncopied.
                assert backend.suspend(1).changed
                assert backend.state().mapped_bytes == 0
            backend.resume()
            self.check(kept)
            assert not backend.state().unusable_tags()

    def test_no_room_can_be_retried(self) -> None:
        """Room that is missing is an error with numbers; with room the same call works."""
        with self.opened() as backend:
            contents = self.populate(backend, "weights")
            backend.suspend(1 if backend.capabilities.supports_offload else 2)

            def no_room(message: str) -> Exception:
                return HostMemoryError(message, needed_bytes=2, available_bytes=1)

            with (
                FaultInjector(backend, {"reserve": [0]}, no_room),
                pytest.raises(NoRoomError) as caught,
            ):
                backend.resume()
            assert caught.value.needed_bytes == 2
            assert caught.value.recoverable
            assert backend.state().mapped_bytes == 0
            backend.resume()
            if backend.capabilities.supports_offload:
                self.check(contents)

    def test_waiting_for_memory(self) -> None:
        """With ``wait_for_memory_s`` a resume waits for a neighbour instead of failing."""
        with self.opened(wait_for_memory_s=30.0) as backend:
            self.populate(backend, "kv_cache")
            backend.suspend(1)

            def no_room(message: str) -> Exception:
                return HostMemoryError(message)

            with FaultInjector(backend, {"reserve": [0, 1]}, no_room) as injector:
                backend.resume()
            assert injector.calls["reserve"] == 3

    @staticmethod
    def residency_or_none(backend: Any, tag: str) -> Residency | None:
        """Return the one residency of a tag, or None if it has several."""
        found = backend.state().tags[tag].residencies
        return next(iter(found)) if len(found) == 1 else None

    @staticmethod
    def _fails(call: Any, injector: FaultInjector, backend: BaseBackend[Any]) -> bool:
        """Tell whether the call raised; check that it did so exactly if a fault fired."""
        try:
            call()
        except SleepBackendsError as error:
            assert injector.fired, f"failed without a fault: {error}"
            assert isinstance(error, MechanismError)
            assert error.backend == backend.name
            assert error.recoverable
            after = {name: change.after for name, change in error.report.tags.items()}
            assert after == dict(backend.state().tags), "the error's report is not the state"
            return True
        assert not injector.fired, "a fault was swallowed"
        return False
