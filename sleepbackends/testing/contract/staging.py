"""Copying ahead, with the flag both ways."""

from __future__ import annotations

from typing import Any

import pytest

from sleepbackends.errors import UnknownTagError, UnsupportedOperationError
from sleepbackends.orchestrator import Orchestrator
from sleepbackends.testing.contract.fixtures import SIZES, ContractFixtures
from sleepbackends.testing.promises import Promise, proves


class StagingTests(ContractFixtures):
    """What ``supports_staging`` promises."""

    @proves(Promise.STAGING)
    def test_what_was_staged_is_not_copied_again(self, backend: Any) -> None:
        """A suspend right after a staging copies nothing, and everything comes back."""
        self.need(backend, "supports_staging", "supports_offload")
        self.assume("one_block_each")
        contents = self.populate(backend)
        kept = sum(SIZES["weights"] + SIZES["lora"])
        copied = backend.stage(background=False).wait(0).copied_bytes
        assert copied == kept, f"{kept} bytes were to be staged, {copied} were copied"
        staged = sum(backend.staged().tags.values())
        assert staged == kept, f"{kept} bytes were staged, staged() says {staged}"
        report = backend.suspend(1)
        told = (report.copied_bytes, report.clean_bytes)
        assert told == (0, kept), f"all was staged; suspend says (copied, clean) = {told}"
        backend.resume()
        self.check(self.of(contents, "weights"))

    @proves(Promise.STAGING)
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

    @proves(Promise.STAGING)
    def test_staging_leaves_what_is_asleep_alone(self, backend: Any) -> None:
        """Saved bytes are neither read nor written, and an unknown tag is refused."""
        self.need(backend, "supports_staging", "supports_offload")
        contents = self.populate(backend, "weights")
        backend.suspend(1)
        state = backend.state()
        copied = backend.stage(background=False).wait(0).copied_bytes
        assert copied == 0, f"everything sleeps, and staging copied {copied} bytes"
        with pytest.raises(UnknownTagError):
            backend.stage(["typo"])
        assert backend.state() == state, "staging changed the state of what sleeps"
        backend.resume()
        self.check(contents)

    @proves(Promise.FLAGS)
    def test_without_staging_it_is_refused(self, backend: Any) -> None:
        """An orchestrator asks the flag first."""
        self.need_not(backend, "supports_staging")
        with pytest.raises(UnsupportedOperationError, match="supports_staging"):
            Orchestrator(backend).stage()
        assert Orchestrator(backend).plan_sleep(0).staged_bytes == 0
