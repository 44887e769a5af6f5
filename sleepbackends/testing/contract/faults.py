"""A fault at each step of each transition: what is promised then."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from sleepbackends.errors import HostMemoryError, MechanismError, NoRoomError, SleepBackendsError
from sleepbackends.residency import Residency
from sleepbackends.testing.contract.fixtures import Contents, ContractFixtures
from sleepbackends.testing.faults import STEPS, FaultInjector
from sleepbackends.testing.promises import Promise, proves

_MOST_CALLS = 8
_LARGE = 8 << 20
"""Large enough to be seen in what the system says this process uses."""


class FaultTests(ContractFixtures):
    """Nothing lost, nothing half-awake, and the same call works afterwards."""

    @proves(Promise.ALL_OR_REPORTED)
    @pytest.mark.parametrize("step", STEPS)
    def test_suspend(self, step: str) -> None:
        """A failed suspend changed nothing, or dropped only what it may drop, and says so."""
        fired = 0
        for call in range(_MOST_CALLS):
            with self.opened() as backend:
                self.need_steps(backend)
                self.need(backend, "supports_offload")
                contents = self.populate(backend)
                fired += self._suspend_with_fault(backend, contents, step, call)
        if step in ("synchronize", "check_room_to_save", "save", "unmap"):
            assert fired, f"{step} was never called by suspend"

    def _suspend_with_fault(self, backend: Any, contents: Contents, step: str, call: int) -> int:
        kept = self.of(contents, "weights", "lora")
        before = backend.state()
        with FaultInjector(backend, {step: [call]}) as injector:
            failed = self._fails(lambda: backend.suspend(1), injector, backend)
        if not failed:
            assert backend.state().mapped_bytes == 0, "a suspend left something mapped"
            backend.resume()
            self.check(kept)
            return 0
        if self.residency(backend, "kv_cache") is Residency.RESIDENT:
            self.check(contents)
            assert backend.state() == before, (
                f"nothing was dropped, and the state is {backend.state()}"
            )
        else:
            # Dropping had begun: everything kept is safe, and the call can be finished.
            gone = backend.state().tags["kv_cache"].discarded_bytes
            assert gone > 0, f"kv_cache is neither resident nor dropped: {backend.state()}"
        backend.suspend(1)
        left = backend.state().mapped_bytes
        assert left == 0, f"after the call was made again {left} bytes are mapped"
        backend.resume()
        self.check(kept)
        return 1

    @proves(Promise.COPY_OUTLIVES_RESTORE)
    @pytest.mark.parametrize("step", STEPS)
    def test_resume(self, step: str) -> None:
        """A failed resume leaves everything asleep with its bytes safe."""
        fired = 0
        for call in range(_MOST_CALLS):
            with self.opened() as backend:
                self.need_steps(backend)
                self.need(backend, "supports_offload")
                kept = self.of(self.populate(backend), "weights", "lora")
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
                    Promise.NEVER_HALF_AWAKE.check(
                        backend.state() == asleep,
                        f"a failed resume left something awake: {backend.state()}",
                    )
                    used = self.used_bytes(backend)
                    if used is not None and used_before is not None:
                        Promise.NEVER_HALF_AWAKE.check(
                            used - used_before < _LARGE // 2,
                            f"memory was left mapped: {used - used_before} bytes",
                        )
                    backend.resume()
                self.check(kept)
        if step in ("reserve", "map", "restore", "fill"):
            assert fired, f"{step} was never called by resume"

    @proves(Promise.ALL_OR_REPORTED)
    @pytest.mark.parametrize("step", ["synchronize", "unmap"])
    def test_discard(self, step: str) -> None:
        """A failed discard says what is where, leaves the rest alone and can be repeated."""
        for call in range(2):
            with self.opened() as backend:
                self.need_steps(backend)
                self.need(backend, "supports_selective_release")
                kept = self.populate(backend, "weights")
                self.populate(backend, "kv_cache")
                with FaultInjector(backend, {step: [call]}) as injector:
                    discard = partial(backend.discard, ["kv_cache"])
                    failed = self._fails(discard, injector, backend)
                gone = backend.state().tags["kv_cache"]
                assert failed == (gone.resident_bytes > 0), f"failed: {failed}, kv_cache: {gone}"
                epoch = 1 if gone.discarded_bytes else 0
                Promise.EPOCHS.check(gone.epoch == epoch, f"expected epoch {epoch}: {gone}")
                again = backend.discard(["kv_cache"]).changed
                assert again == failed, f"failed: {failed}, and the next discard changed: {again}"
                self.check_residency(
                    backend, Promise.POLICIES, "discard again", kv_cache=Residency.DISCARDED
                )
                self.check(kept)

    @proves(Promise.ALL_OR_REPORTED)
    @pytest.mark.parametrize("undo", ["map", "restore", "reserve", "unmap"])
    def test_a_fault_while_undoing(self, undo: str) -> None:
        """When undoing fails as well, the bytes are still safe and the state still true."""
        with self.opened() as backend:
            self.need_steps(backend)
            self.need(backend, "supports_offload")
            kept = self.populate(backend, "weights", "lora")
            faults = {"save": [2], undo: [0, 1, 2]} if undo != "unmap" else {"unmap": [2, 3]}
            with FaultInjector(backend, faults) as injector:
                assert self._fails(lambda: backend.suspend(1), injector, backend), "nothing failed"
            backend.suspend(1)
            with FaultInjector(backend, {"restore": [1], "unmap": [0, 2]}) as injector:
                assert self._fails(backend.resume, injector, backend), "nothing failed"
            awake = [name for name, tag in backend.state().tags.items() if tag.resident_bytes]
            Promise.NEVER_HALF_AWAKE.check(
                not awake, f"a failed resume left something awake: {awake}"
            )
            if undo == "map":
                # What is mapped with its copy still owed goes back to sleep uncopied.
                assert backend.suspend(1).changed, "what was left mapped cannot be suspended"
                assert backend.state().mapped_bytes == 0, "a suspend left something mapped"
            backend.resume()
            self.check(kept)
            assert not backend.state().unusable_tags(), "resume() left something unusable"

    @proves(Promise.ROOM)
    def test_no_room_can_be_retried(self) -> None:
        """Room that is missing is an error with numbers; with room the same call works."""
        with self.opened() as backend:
            self.need_steps(backend)
            contents = self.populate(backend, "weights")
            backend.suspend(self.keeping_level(backend))
            asleep = backend.state()

            def no_room(message: str) -> Exception:
                return HostMemoryError(message, needed_bytes=2, available_bytes=1)

            with (
                FaultInjector(backend, {"reserve": [0]}, no_room),
                pytest.raises(NoRoomError) as caught,
            ):
                backend.resume()
            told = (caught.value.needed_bytes, caught.value.available_bytes)
            assert told == (2, 1), f"2 bytes were needed and 1 available; the error says {told}"
            assert caught.value.recoverable, "missing room is called unrecoverable"
            Promise.NEVER_HALF_AWAKE.check(
                backend.state() == asleep,
                f"a resume without room left something awake: {backend.state()}",
            )
            backend.resume()
            if backend.capabilities.supports_offload:
                self.check(contents)

    @proves(Promise.ROOM)
    def test_waiting_for_memory(self) -> None:
        """With ``wait_for_memory_s`` a resume waits for a neighbour instead of failing."""
        with self.opened(wait_for_memory_s=30.0) as backend:
            self.need_steps(backend)
            self.populate(backend, "kv_cache")
            backend.suspend(1)

            def no_room(message: str) -> Exception:
                return HostMemoryError(message)

            with FaultInjector(backend, {"reserve": [0, 1]}, no_room) as injector:
                backend.resume()
            tried = injector.calls["reserve"]
            assert tried == 3, f"there was room at the third try; it tried {tried} times"

    @staticmethod
    def _fails(call: Callable[[], object], injector: FaultInjector, backend: Any) -> bool:
        """Tell whether the call raised; check that it did so exactly if a fault fired."""
        try:
            call()
        except SleepBackendsError as error:
            check_failure(error, injector, backend)
            return True
        except Exception as error:  # noqa: BLE001 - which kind it is is under test
            kind = f"{type(error).__name__}: {error}"
            Promise.ERRORS.check(False, f"{kind} is no error of the tree")
        if injector.fired:  # a call without a fault is no trial of it
            Promise.FAULTS_SHOW.check(
                False, "a fault was swallowed: the step raised, the call did not"
            )
        return False


def check_failure(error: SleepBackendsError, injector: FaultInjector, backend: Any) -> None:
    """Check that a fault led to this error, and that it says what is so."""
    Promise.FAULTS_SHOW.check(injector.fired, f"failed without a fault: {error}")
    Promise.ERRORS.check(
        isinstance(error, MechanismError) and error.recoverable and error.backend == backend.name,
        f"a step failed, and the error is a {type(error).__name__} of {error.backend!r} with "
        f"recoverable={error.recoverable}",
    )
    Promise.ALL_OR_REPORTED.check(error.report, "the error has no report")
    after = {name: change.after for name, change in error.report.tags.items()}
    now = dict(backend.state().tags)
    Promise.ALL_OR_REPORTED.check(
        after == now, f"the error's report is not the state: it says {after}, the state {now}"
    )
