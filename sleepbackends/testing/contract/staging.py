"""Copying ahead, with the flag both ways."""

from __future__ import annotations

from typing import Any

import pytest

from sleepbackends.errors import UnknownTagError, UnsupportedOperationError
from sleepbackends.orchestrator import Orchestrator
from sleepbackends.testing.contract.fixtures import SIZES, ContractFixtures


class StagingTests(ContractFixtures):
    """What ``supports_staging`` promises."""

    def test_what_was_staged_is_not_copied_again(self, backend: Any) -> None:
        """A suspend right after a staging copies nothing, and everything comes back."""
        self.need(backend, "supports_staging", "supports_offload")
        contents = self.populate(backend)
        kept = sum(SIZES["weights"] + SIZES["lora"])
        assert backend.stage(background=False).wait(0).copied_bytes == kept
        assert sum(backend.staged().tags.values()) == kept
        report = backend.suspend(1)
        assert (report.copied_bytes, report.clean_bytes) == (0, kept)
        backend.resume()
        self.check({m: data for m, data in contents.items() if len(data) in SIZES["weights"]})

    def test_what_changed_after_a_staging_is_saved(self, backend: Any) -> None:
        """The bytes of the suspend count, not those of the staging."""
        self.need(backend, "supports_staging", "supports_offload")
        contents = self.populate(backend, "weights", "lora")
        backend.stage().wait(60)
        for number, (memory, data) in enumerate(contents.items()):
            contents[memory] = bytes([number]) + data[1:-1] + b"!"
            memory.write(contents[memory])
        backend.suspend(1)
        backend.resume()
        self.check(contents)

    def test_staging_leaves_what_is_asleep_alone(self, backend: Any) -> None:
        """Saved bytes are neither read nor written, and an unknown tag is refused."""
        self.need(backend, "supports_staging", "supports_offload")
        contents = self.populate(backend, "weights")
        backend.suspend(1)
        state = backend.state()
        assert backend.stage(background=False).wait(0).copied_bytes == 0
        with pytest.raises(UnknownTagError):
            backend.stage(["typo"])
        assert backend.state() == state
        backend.resume()
        self.check(contents)

    def test_without_staging_it_is_refused(self, backend: Any) -> None:
        """An orchestrator asks the flag first."""
        self.need_not(backend, "supports_staging")
        with pytest.raises(UnsupportedOperationError, match="supports_staging"):
            Orchestrator(backend).stage()
        assert Orchestrator(backend).plan_sleep(0).staged_bytes == 0
