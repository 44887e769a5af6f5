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


class SelectiveTests(ContractFixtures):
    """What ``supports_selective_release`` and ``supports_selective_resume`` promise."""

    def test_discard_releases_the_named_tags_only(self, backend: Any) -> None:
        """The rest stays resident and untouched; the epoch counts the loss once."""
        self.need(backend, "supports_selective_release")
        kept = self.populate(backend, "weights")
        dropped = self.populate(backend, "kv_cache")
        report = backend.discard(["kv_cache"])
        assert report.changed
        assert report.dropped_tags == {"kv_cache"}
        assert self.residency(backend, "weights") is Residency.RESIDENT
        self.check(kept)
        assert not backend.discard(["kv_cache"]).changed
        assert backend.state().tags["kv_cache"].epoch == 1
        assert backend.resume(["kv_cache"]).undefined_tags == {"kv_cache"}
        assert all(memory.read() == bytes(len(data)) for memory, data in dropped.items())
        self.check(kept)

    def test_discard_refuses(self) -> None:
        """An unknown tag, a kept tag and saved bytes are refused, and nothing changes."""
        with self.opened(policies(lora="keep")) as backend:
            self.need(backend, "supports_selective_release", "supports_offload")
            contents = self.populate(backend, "weights", "lora")
            with pytest.raises(UnknownTagError):
                backend.discard(["weights", "typo"])
            with pytest.raises(PolicyConflictError, match="keep"):
                backend.discard(["weights", "lora"])
            self.check(contents)
            backend.suspend(1)
            with pytest.raises(PolicyConflictError, match="weights"):
                backend.discard(["weights"])
            backend.resume()
            self.check(contents)

    def test_without_selective_release_discard_is_refused(self, backend: Any) -> None:
        """Calling what the flag denies is one error type, and nothing changes."""
        self.need_not(backend, "supports_selective_release")
        contents = self.populate(backend)
        with pytest.raises(UnsupportedOperationError, match="supports_selective_release"):
            backend.discard(["kv_cache"])
        self.check(contents)
        assert not backend.state().unusable_tags()

    def test_resume_of_some_tags(self, backend: Any) -> None:
        """Only the named tags come back; in a second call the others do."""
        self.need(backend, "supports_selective_resume", "supports_offload")
        contents = self.populate(backend)
        weights = dict(list(contents.items())[:2])
        backend.suspend(1)
        report = backend.resume(["weights"])
        assert set(report.tags) == {"weights"}
        self.check(weights)
        assert self.residency(backend, "lora") is Residency.OFFLOADED
        assert self.residency(backend, "kv_cache") is Residency.DISCARDED
        assert backend.resume(["weights", "lora"]).changed
        backend.resume()
        self.check({m: b for m, b in contents.items() if m in weights or len(b) == 4097})

    def test_without_selective_resume_some_tags_are_refused(self, backend: Any) -> None:
        """Calling what the flag denies is one error type, and nothing changes."""
        self.need_not(backend, "supports_selective_resume")
        self.populate(backend)
        backend.suspend(2 if not backend.capabilities.supports_offload else 1)
        state = backend.state()
        with pytest.raises(UnsupportedOperationError, match="supports_selective_resume"):
            backend.resume(["weights"])
        assert backend.state() == state
        assert backend.resume(list(state.tags)).changed

    def test_without_offload_level_1_is_refused(self, backend: Any) -> None:
        """A backend that cannot keep contents says so before it drops any."""
        self.need_not(backend, "supports_offload")
        contents = self.populate(backend)
        with pytest.raises(UnsupportedOperationError, match="supports_offload"):
            backend.suspend(1)
        self.check(contents)

    @pytest.mark.parametrize("fill", [Fill.ZERO, Fill.POISON])
    def test_fill_after_discard(self, fill: Fill) -> None:
        """Memory whose contents are gone comes back filled as configured, to the last byte."""
        with self.opened(fill=fill) as backend:
            contents = self.populate(backend, "kv_cache")
            backend.suspend(1)
            backend.resume()
            byte = POISON_BYTE if fill is Fill.POISON else 0
            for memory, data in contents.items():
                assert memory.read() == bytes([byte]) * len(data)
