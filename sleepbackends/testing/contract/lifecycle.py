"""Suspend and resume everything: bytes, addresses, repetition, bad requests, closing."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from sleepbackends.availability import Availability
from sleepbackends.capabilities import Capabilities
from sleepbackends.control import Control, Progress
from sleepbackends.errors import (
    ClosedError,
    InvalidLevelError,
    PolicyConflictError,
    RequestError,
    SleepBackendsError,
    TransitionTimeoutError,
    UnknownTagError,
)
from sleepbackends.protocol import API_VERSION
from sleepbackends.residency import Residency
from sleepbackends.testing.contract.fixtures import SIZES, ContractFixtures, policies


class LifecycleTests(ContractFixtures):
    """What holds for every backend."""

    def test_identity_and_probe(self, backend: Any) -> None:
        """The backend says who it is, what it can do and whether it can work here."""
        assert backend.name
        assert backend.api_version == API_VERSION
        assert isinstance(backend.capabilities, Capabilities)
        answer = type(backend).probe()
        assert isinstance(answer, Availability)
        assert answer.ok, answer

    def test_level_1_keeps_contents(self, backend: Any) -> None:
        """Offloaded bytes come back bit-exact at the same addresses."""
        self.need(backend, "supports_offload")
        contents = self.populate(backend)
        addresses = [memory.address for memory in contents]
        report = backend.suspend(1)
        assert report.changed
        assert self.residency(backend, "weights") is Residency.OFFLOADED
        assert self.residency(backend, "lora") is Residency.OFFLOADED
        assert self.residency(backend, "kv_cache") is Residency.DISCARDED
        assert backend.state().mapped_bytes == 0
        assert report.released_bytes == sum(sum(sizes) for sizes in SIZES.values())
        assert report.copied_bytes == sum(SIZES["weights"] + SIZES["lora"])
        report = backend.resume()
        assert report.changed
        assert report.undefined_tags == {"kv_cache"}
        if backend.capabilities.preserves_addresses:
            assert [memory.address for memory in contents] == addresses
        for memory, expected in contents.items():
            kept = memory.read() == expected
            dropped = memory.read() == bytes(len(expected))
            assert kept or dropped
        self.check({m: b for m, b in contents.items() if len(b) not in SIZES["kv_cache"]})

    def test_level_2_drops_weights(self, backend: Any) -> None:
        """Level 2 discards what can be reloaded; it comes back zeroed and UNDEFINED."""
        contents = self.populate(backend, "weights", "kv_cache")
        before = backend.state().tags["weights"].epoch
        report = backend.suspend(2)
        assert report.dropped_tags == {"weights", "kv_cache"}
        assert self.residency(backend, "weights") is Residency.DISCARDED
        backend.resume()
        assert self.residency(backend, "weights") is Residency.UNDEFINED
        assert backend.state().tags["weights"].epoch == before + 1
        assert all(memory.read() == bytes(len(data)) for memory, data in contents.items())
        backend.mark_valid(["weights", "kv_cache"])
        assert not backend.state().unusable_tags()

    def test_level_0_changes_nothing(self, backend: Any) -> None:
        """Level 0 is a pause; memory stays."""
        contents = self.populate(backend)
        assert not backend.suspend(0).changed
        self.check(contents)

    def test_memory_is_given_back(self, backend: Any) -> None:
        """Suspend gives memory back by a count made around the backend."""
        contents = self.populate(backend, "kv_cache")
        size = 64 << 20
        contents[self.allocate(backend, "kv_cache", size)] = b""
        for memory in contents:
            memory.write(b"\x01" * len(memory.read()))
        awake = self.used_bytes(backend)
        if awake is None:
            pytest.skip("used_bytes() is not defined")
        backend.suspend(1)
        asleep = self.used_bytes(backend)
        assert asleep is not None
        assert awake - asleep >= 0.95 * size

    def test_repeating_is_a_no_op_that_says_so(self, backend: Any) -> None:
        """The second call changes nothing, the third neither."""
        contents = self.populate(backend, "kv_cache")
        assert not backend.resume().changed
        assert backend.suspend(1).changed
        state = backend.state()
        assert not backend.suspend(1).changed
        assert not backend.suspend(2).changed
        assert backend.state() == state
        assert backend.resume().changed
        assert not backend.resume().changed
        assert not backend.resume([]).changed
        assert len(contents) == len(SIZES["kv_cache"])

    def test_conflicting_requests_are_refused(self, backend: Any) -> None:
        """Dropping what is saved, or saving what is gone, changes nothing and says why."""
        self.need(backend, "supports_offload")
        contents = self.populate(backend, "weights")
        backend.suspend(1)
        state = backend.state()
        with pytest.raises(PolicyConflictError) as caught:
            backend.suspend(2)
        assert caught.value.tags == {"weights"}
        assert caught.value.backend == backend.name
        assert backend.state() == state
        backend.resume()
        self.check(contents)
        backend.suspend(2)
        with pytest.raises(PolicyConflictError):
            backend.suspend(1)

    def test_keep_stays_resident(self) -> None:
        """The policy ``keep`` is followed."""
        with self.opened(policies(weights="keep")) as backend:
            contents = self.populate(backend, "weights")
            kv_cache = self.populate(backend, "kv_cache")
            backend.suspend(2)
            assert self.residency(backend, "weights") is Residency.RESIDENT
            self.check(contents)
            assert kv_cache

    def test_undefined_bytes_survive_a_sleep_as_undefined(self) -> None:
        """An engine may have written to UNDEFINED memory: it is saved, and stays UNDEFINED."""
        with self.opened(policies(kv_cache="offload")) as backend:
            self.need(backend, "supports_offload")
            (memory, *_) = self.populate(backend, "weights")
            backend.suspend(2)
            backend.resume()
            data = b"\x5a" * len(memory.read())
            memory.write(data)
            backend.suspend(1)
            assert self.residency(backend, "weights") is Residency.OFFLOADED
            backend.resume()
            assert self.residency(backend, "weights") is Residency.UNDEFINED
            assert memory.read() == data

    @pytest.mark.parametrize("level", [-1, 3, True, "1", None])
    def test_wrong_level(self, backend: Any, level: Any) -> None:
        """A level that does not exist is refused."""
        contents = self.populate(backend, "weights")
        with pytest.raises(InvalidLevelError):
            backend.suspend(level)
        self.check(contents)

    def test_unknown_tag(self, backend: Any) -> None:
        """An unknown tag is refused before anything changes, and the known ones listed."""
        self.populate(backend, "weights")
        backend.suspend(2)
        for verb in (backend.resume, backend.mark_valid):
            with pytest.raises(UnknownTagError) as caught:
                verb(["weights", "typo"])
            assert caught.value.known == ("weights",)
            assert "weights" in str(caught.value)
        assert self.residency(backend, "weights") is Residency.DISCARDED
        with pytest.raises(RequestError, match=r"\['weights'\]"):
            backend.resume("weights")

    def test_mark_valid_needs_mapped_memory(self, backend: Any) -> None:
        """Asleep memory cannot be valid."""
        self.populate(backend, "weights")
        backend.suspend(2)
        with pytest.raises(PolicyConflictError):
            backend.mark_valid(["weights"])
        assert self.residency(backend, "weights") is Residency.DISCARDED

    def test_free_in_every_residency(self, backend: Any) -> None:
        """Freed blocks vanish from the state, and the rest is not disturbed."""
        for steps in ([], [1], [2], [2, None]):
            kept = self.populate(backend, "kv_cache")
            freed = self.allocate(backend, "lora" if steps == [1] else "kv_cache", 4097)
            before = backend.state()
            for level in steps:
                if level is None:
                    backend.resume()
                elif level == 2 or backend.capabilities.supports_offload:
                    backend.suspend(level)
            freed.free()
            total = sum(tag.total_bytes for tag in backend.state().tags.values())
            assert total == sum(tag.total_bytes for tag in before.tags.values()) - 4097
            backend.resume()
            backend.mark_valid(["kv_cache"])
            for memory in kept:
                memory.free()
        assert backend.state().mapped_bytes == 0

    def test_progress_ends_at_the_total(self, backend: Any) -> None:
        """Progress counts every copied byte, once, and a callback that raises is ignored."""
        self.need(backend, "supports_offload")
        self.populate(backend)
        total = sum(SIZES["weights"] + SIZES["lora"])
        seen: list[Progress] = []
        backend.suspend(1, control=Control(on_progress=seen.append))
        assert seen[-1] == Progress("suspend", total, total)
        seen.clear()

        def record_and_raise(progress: Progress) -> None:
            seen.append(progress)
            raise RuntimeError("a broken progress bar")

        assert backend.resume(control=Control(on_progress=record_and_raise)).changed
        assert seen[-1] == Progress("resume", total, total)

    def test_deadline_rolls_back(self, backend: Any) -> None:
        """A deadline that has passed leaves everything as it was."""
        self.need(backend, "supports_offload")
        contents = self.populate(backend, "weights")
        with pytest.raises(TransitionTimeoutError) as caught:
            backend.suspend(1, control=_Expired())
        assert not caught.value.report.changed
        self.check(contents)
        backend.suspend(1)
        with pytest.raises(TransitionTimeoutError):
            backend.resume(control=_Expired())
        assert self.residency(backend, "weights") is Residency.OFFLOADED
        backend.resume()
        self.check(contents)

    def test_errors_survive_pickling(self, backend: Any) -> None:
        """An error can cross to another process with what it carries."""
        self.populate(backend, "weights")
        with pytest.raises(SleepBackendsError) as caught:
            backend.resume(["typo"])
        copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - made two lines above
        assert str(copy) == str(caught.value)
        assert vars(copy) == vars(caught.value)

    def test_closed(self) -> None:
        """A closed backend refuses, can be closed again, and leaves mapped memory usable."""
        with self.opened() as backend:
            contents = self.populate(backend, "weights")
            backend.close()
            backend.close()
            self.check(contents)
            for call in (backend.suspend, backend.resume, lambda: self.populate(backend, "lora")):
                with pytest.raises(ClosedError):
                    call()
            for memory in contents:
                memory.free()
            assert backend.state().mapped_bytes == 0


class _Expired(Control):
    """A deadline that passes as soon as the copy has begun."""

    def __init__(self) -> None:
        super().__init__(timeout_s=3600.0)

    def remaining_s(self) -> float | None:
        return 0.0 if self.progress.done_bytes else 3600.0
