"""Suspend and resume everything: identity, levels, repetition, bad requests, closing."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from sleepbackends.availability import Availability
from sleepbackends.capabilities import Capabilities
from sleepbackends.errors import (
    ClosedError,
    InvalidLevelError,
    PolicyConflictError,
    RequestError,
    SleepBackendsError,
    UnknownTagError,
)
from sleepbackends.protocol import API_VERSION, OLDEST_API_VERSION
from sleepbackends.residency import Residency
from sleepbackends.testing.contract.fixtures import SIZES, ContractFixtures, policies
from sleepbackends.testing.promises import Promise, proves

_LARGE = 16 << 20
"""Large enough to be seen in what the system says this process uses, beside what a backend takes
once, such as tables for its kernels."""


class LifecycleTests(ContractFixtures):
    """What holds for every backend."""

    @proves(Promise.IDENTITY)
    def test_identity_and_probe(self, backend: Any) -> None:
        """The backend says who it is, what it can do and whether it can work here."""
        assert backend.name
        version = backend.api_version
        assert OLDEST_API_VERSION <= version <= API_VERSION, f"its contract is version {version}"
        assert isinstance(backend.capabilities, Capabilities)
        answer = type(backend).probe()
        assert isinstance(answer, Availability)
        assert answer.ok, f"it works, and its probe says {answer}"

    @proves(Promise.FLAGS)
    def test_capabilities_stay_as_they_are(self, backend: Any) -> None:
        """What an instance can do does not change by sleeping."""
        before = backend.capabilities
        self.populate(backend, "kv_cache")
        backend.suspend(1)
        asleep = backend.capabilities
        backend.resume()
        assert asleep == before, f"asleep the flags are {asleep}"
        assert backend.capabilities == before, f"after a sleep the flags are {backend.capabilities}"

    @proves(Promise.FLAGS)
    def test_only_owners_of_allocations_have_regions(self, backend: Any) -> None:
        """``owns_allocations`` and ``region`` go together."""
        has_region = callable(getattr(backend, "region", None))
        assert has_region == backend.capabilities.owns_allocations, (
            f"owns_allocations is {backend.capabilities.owns_allocations}, region is there: "
            f"{has_region}"
        )

    @proves(Promise.POLICIES)
    def test_level_2_drops_weights(self, backend: Any) -> None:
        """Level 2 discards what can be reloaded; it comes back zeroed and UNDEFINED."""
        contents = self.populate(backend, "weights", "kv_cache")
        before = backend.state().tags["weights"].epoch
        report = backend.suspend(2)
        gone = dict.fromkeys(("weights", "kv_cache"), Residency.DISCARDED)
        self.check_residency(backend, Promise.POLICIES, "suspend(2)", **gone)
        Promise.REPORTS.check(
            report.dropped_tags == {"weights", "kv_cache"},
            f"suspend(2) dropped both tags and reports {sorted(report.dropped_tags)}",
        )
        backend.resume()
        back = dict.fromkeys(("weights", "kv_cache"), Residency.UNDEFINED)
        self.check_residency(backend, Promise.UNDEFINED, "suspend(2) and resume()", **back)
        after = backend.state().tags["weights"].epoch
        Promise.EPOCHS.check(after == before + 1, f"weights went from epoch {before} to {after}")
        self.check_filled(contents)
        backend.mark_valid(["weights", "kv_cache"])
        unusable = backend.state().unusable_tags()
        Promise.UNDEFINED.check(not unusable, f"after mark_valid these are unusable: {unusable}")

    @proves(Promise.EPOCHS)
    def test_epochs_count_what_was_lost(self, backend: Any) -> None:
        """Each sleep that drops a tag counts once; saving, keeping and waking do not."""
        self.populate(backend, "weights", "kv_cache")
        for sleeps in (1, 2):
            backend.suspend(self.keeping_level(backend))
            backend.resume()
            kept = sleeps if self.keeping_level(backend) == 2 else 0
            for tag, expected in (("kv_cache", sleeps), ("weights", kept)):
                found = backend.state().tags[tag].epoch
                assert found == expected, (
                    f"{tag} lost contents {expected} times, its epoch is {found}"
                )

    @proves(Promise.POLICIES)
    def test_level_0_changes_nothing(self, backend: Any) -> None:
        """Level 0 is a pause; memory stays."""
        contents = self.populate(backend)
        assert not backend.suspend(0).changed, "suspend(0) says that it changed something"
        self.check(contents)

    @proves(Promise.GIVES_BACK)
    def test_memory_is_given_back(self, backend: Any) -> None:
        """Suspend gives memory back by a count made around the backend."""
        contents = self.populate(backend, "kv_cache")
        contents[self.allocate(backend, "kv_cache", self.large_bytes)] = b""
        for memory in contents:
            memory.write(b"\x01" * len(memory.read()))
        awake = self.measure(backend)
        backend.suspend(1)
        back = awake - self.measure(backend)
        assert back >= 0.95 * self.large_bytes, (
            f"{self.large_bytes} bytes were suspended, {back} were given back"
        )

    @proves(Promise.REPEATING)
    def test_repeating_is_a_no_op_that_says_so(self, backend: Any) -> None:
        """The second call changes nothing, the third neither."""
        contents = self.populate(backend, "kv_cache")
        assert not backend.resume().changed, "resume() of what is awake says changed"
        assert backend.suspend(1).changed, "the first suspend() says that nothing changed"
        state = backend.state()
        assert not backend.suspend(1).changed, "the second suspend() says changed"
        assert not backend.suspend(2).changed, "suspend(2) of what was dropped says changed"
        assert backend.state() == state, "repeating changed the state"
        assert backend.resume().changed, "resume() of what sleeps says that nothing changed"
        assert not backend.resume().changed, "the second resume() says changed"
        assert not backend.resume([]).changed, "resume([]) says changed"
        assert len(contents) == len(SIZES["kv_cache"])

    @proves(Promise.POLICIES)
    def test_keep_stays_resident(self) -> None:
        """The policy ``keep`` is followed."""
        with self.opened(policies(weights="keep")) as backend:
            contents = self.populate(backend, "weights")
            kv_cache = self.populate(backend, "kv_cache")
            backend.suspend(2)
            self.check_residency(
                backend, Promise.POLICIES, "suspend(2) with keep", weights=Residency.RESIDENT
            )
            self.check(contents)
            assert kv_cache

    @proves(Promise.POLICIES)
    def test_policies_of_one_call(self, backend: Any) -> None:
        """A suspend that is given policies follows those, and the next one its own again."""
        contents = self.populate(backend, "weights", "kv_cache")
        backend.suspend(2, policies=policies(weights="keep", kv_cache="keep"))
        both = dict.fromkeys(("weights", "kv_cache"), Residency.RESIDENT)
        self.check_residency(backend, Promise.POLICIES, "a suspend that keeps both", **both)
        self.check(contents)
        backend.suspend(2)
        self.check_residency(
            backend, Promise.POLICIES, "the next suspend(2)", weights=Residency.DISCARDED
        )

    @proves(Promise.CHECKED_FIRST)
    @pytest.mark.parametrize("level", [-1, 3, True, "1", None])
    def test_wrong_level(self, backend: Any, level: Any) -> None:
        """A level that does not exist is refused."""
        contents = self.populate(backend, "weights")
        before = backend.state()
        with pytest.raises(InvalidLevelError):
            backend.suspend(level)
        assert backend.state() == before, f"suspend({level!r}) was refused and changed the state"
        self.check(contents)

    @proves(Promise.UNKNOWN_TAGS)
    def test_unknown_tag(self, backend: Any) -> None:
        """An unknown tag is refused before anything changes, and the known ones listed."""
        self.populate(backend, "weights")
        backend.suspend(2)
        before = backend.state()
        for verb in (backend.resume, backend.mark_valid):
            with pytest.raises(UnknownTagError) as caught:
                verb(["weights", "typo"])
            assert caught.value.known == ("weights",), f"known is {caught.value.known}"
            assert "weights" in str(caught.value), "the message does not list the known tags"
            Promise.CHECKED_FIRST.check(
                backend.state() == before,
                f"{verb.__name__} refused an unknown tag, and the state is {backend.state()}",
            )
        with pytest.raises(RequestError, match=r"\['weights'\]"):
            backend.resume("weights")

    @proves(Promise.CHECKED_FIRST)
    def test_mark_valid_needs_mapped_memory(self, backend: Any) -> None:
        """Asleep memory cannot be valid."""
        self.populate(backend, "weights")
        backend.suspend(2)
        with pytest.raises(PolicyConflictError):
            backend.mark_valid(["weights"])
        self.check_residency(
            backend, Promise.CHECKED_FIRST, "a refused mark_valid", weights=Residency.DISCARDED
        )

    @proves(Promise.FREEING)
    def test_free_in_every_residency(self, backend: Any, caplog: Any) -> None:
        """Freed blocks vanish from the state, and the rest is not disturbed."""
        self.assume("frees_at_once", "one_block_each")
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
            left = sum(tag.total_bytes for tag in before.tags.values()) - 4097
            assert total == left, f"4097 bytes were freed; the state says {total} and not {left}"
            backend.resume()
            backend.mark_valid(["kv_cache"])
            for memory in kept:
                memory.free()
        left = backend.state().mapped_bytes
        assert left == 0, f"everything was freed, and {left} bytes are mapped"
        said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert not said, f"freeing failed: {said[0]}: {caplog.records[-1].exc_info}"

    @proves(Promise.GIVES_BACK)
    def test_freed_memory_is_given_back_once(self, backend: Any) -> None:
        """By a count made around the backend, freeing in any residency ends where it began."""
        self.assume("frees_at_once")
        data = b"\x01" * _LARGE  # made before the first count, which would count it
        before = self.measure(backend)
        for level in (0, 2, self.keeping_level(backend)):
            memory = self.allocate(backend, "weights", _LARGE)
            memory.write(data)
            backend.suspend(level)
            memory.free()
            too_many = self.measure(backend) - before
            assert abs(too_many) < _LARGE // 2, (
                f"{_LARGE} bytes were allocated, suspended at level {level} and freed; "
                f"{too_many:+} bytes are in use"
            )
            backend.resume()

    @proves(Promise.TRAVELS)
    def test_errors_survive_pickling(self, backend: Any) -> None:
        """An error can cross to another process with what it carries."""
        self.populate(backend, "weights")
        with pytest.raises(SleepBackendsError) as caught:
            backend.resume(["typo"])
        copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - made here
        assert str(copy) == str(caught.value)
        assert vars(copy) == vars(caught.value)
        Promise.ERRORS.check(
            caught.value.backend == backend.name, f"the error is of {caught.value.backend!r}"
        )
        Promise.ERRORS.check(caught.value.hint, "the error has no hint")

    @proves(Promise.CLOSING)
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
            if self.frees_at_once:
                left = backend.state().mapped_bytes
                assert left == 0, f"everything was freed, and {left} bytes are mapped"
