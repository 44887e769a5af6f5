"""Selective release and resume, with each flag both ways."""

from __future__ import annotations

from typing import Any

import pytest

from sleepbackends.errors import (
    PolicyConflictError,
    UnknownTagError,
    UnsupportedOperationError,
)
from sleepbackends.mechanism import POISON_BYTE, Fill
from sleepbackends.residency import Residency
from sleepbackends.testing.contract.fixtures import ContractFixtures, policies
from sleepbackends.testing.promises import Promise, proves


class SelectiveTests(ContractFixtures):
    """What ``supports_selective_release`` and ``supports_selective_resume`` promise."""

    @proves(Promise.FLAGS)
    def test_discard_releases_the_named_tags_only(self, backend: Any) -> None:
        """The rest stays resident and untouched; the epoch counts the loss once."""
        self.need(backend, "supports_selective_release")
        kept = self.populate(backend, "weights")
        dropped = self.populate(backend, "kv_cache")
        report = backend.discard(["kv_cache"])
        where = {"kv_cache": Residency.DISCARDED, "weights": Residency.RESIDENT}
        self.check_residency(backend, Promise.FLAGS, "discard(['kv_cache'])", **where)
        Promise.REPORTS.check(
            report.changed and report.dropped_tags == {"kv_cache"},
            f"kv_cache was dropped; the report says {sorted(report.dropped_tags)}",
        )
        self.check(kept)
        Promise.REPEATING.check(
            not backend.discard(["kv_cache"]).changed, "the second discard() says changed"
        )
        epoch = backend.state().tags["kv_cache"].epoch
        Promise.EPOCHS.check(epoch == 1, f"kv_cache was dropped once, its epoch is {epoch}")
        report = backend.resume(["kv_cache"])
        Promise.UNDEFINED.check(
            report.undefined_tags == {"kv_cache"},
            f"kv_cache is to be refilled; the report says {sorted(report.undefined_tags)}",
        )
        self.check_filled(dropped)
        self.check(kept)

    @proves(Promise.GIVES_BACK)
    def test_discarded_memory_is_given_back(self, backend: Any) -> None:
        """Discard gives memory back by a count made around the backend."""
        self.need(backend, "supports_selective_release")
        self.populate(backend, "weights")
        memory = self.allocate(backend, "kv_cache", self.large_bytes)
        memory.write(b"\x01" * self.large_bytes)
        awake = self.measure(backend)
        backend.discard(["kv_cache"])
        back = awake - self.measure(backend)
        assert back >= 0.95 * self.large_bytes, (
            f"{self.large_bytes} bytes were discarded, {back} were given back"
        )

    @proves(Promise.CHECKED_FIRST)
    def test_discard_refuses(self) -> None:
        """An unknown tag, a kept tag and saved bytes are refused, and nothing changes."""
        with self.opened(policies(lora="keep")) as backend:
            self.need(backend, "supports_selective_release", "supports_offload")
            contents = self.populate(backend, "weights", "lora")
            before = backend.state()
            with pytest.raises(UnknownTagError):
                backend.discard(["weights", "typo"])
            with pytest.raises(PolicyConflictError, match="keep"):
                backend.discard(["weights", "lora"])
            assert backend.state() == before, (
                f"a refused discard changed the state to {backend.state()}"
            )
            self.check(contents)
            backend.suspend(1)
            with pytest.raises(PolicyConflictError, match="weights"):
                backend.discard(["weights"])
            backend.resume()
            self.check(contents)

    @proves(Promise.FLAGS)
    def test_without_selective_release_discard_is_refused(self, backend: Any) -> None:
        """Calling what the flag denies is one error type, and nothing changes."""
        self.need_not(backend, "supports_selective_release")
        contents = self.populate(backend)
        with pytest.raises(UnsupportedOperationError, match="supports_selective_release"):
            backend.discard(["kv_cache"])
        self.check(contents)
        assert not backend.state().unusable_tags(), "a refused discard changed something"

    @proves(Promise.FLAGS)
    def test_resume_of_some_tags(self, backend: Any) -> None:
        """Only the named tags come back; in a second call the others do."""
        self.need(backend, "supports_selective_resume", "supports_offload")
        contents = self.populate(backend)
        backend.suspend(1)
        report = backend.resume(["weights"])
        self.check_residency(
            backend,
            Promise.FLAGS,
            "resume(['weights'])",
            weights=Residency.RESIDENT,
            lora=Residency.OFFLOADED,
            kv_cache=Residency.DISCARDED,
        )
        Promise.REPORTS.check(
            set(report.tags) == {"weights"}, f"the report is of tags {sorted(report.tags)}"
        )
        self.check(self.of(contents, "weights"))
        assert backend.resume(["weights", "lora"]).changed, "resuming the other one did nothing"
        backend.resume()
        self.check(self.of(contents, "weights", "lora"))

    @proves(Promise.FLAGS)
    def test_without_selective_resume_some_tags_are_refused(self, backend: Any) -> None:
        """Calling what the flag denies is one error type, and nothing changes."""
        self.need_not(backend, "supports_selective_resume")
        self.populate(backend, "weights", "kv_cache")
        backend.suspend(self.keeping_level(backend))
        state = backend.state()
        with pytest.raises(UnsupportedOperationError, match="supports_selective_resume"):
            backend.resume(["weights"])
        assert backend.state() == state, "a refused resume changed the state"
        assert backend.resume(list(state.tags)).changed, "resuming all tags by name did nothing"

    @proves(Promise.UNDEFINED)
    @pytest.mark.parametrize("fill", [Fill.ZERO, Fill.POISON])
    def test_fill_after_discard(self, fill: Fill) -> None:
        """Memory whose contents are gone comes back filled as configured, to the last byte."""
        with self.opened(fill=fill) as backend:
            contents = self.populate(backend, "kv_cache")
            backend.suspend(1)
            backend.resume()
            self.check_filled(contents, POISON_BYTE if fill is Fill.POISON else 0)
