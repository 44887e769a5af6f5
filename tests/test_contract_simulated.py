"""The contract suite over the simulated backend, with each capability both ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from sleepbackends.settings import BackendSettings
from sleepbackends.testing import BackendContractTests, SimulatedBackend, SimulatedOptions
from sleepbackends.testing.simulated import ALL


class TestSimulated(BackendContractTests):
    flags: ClassVar[dict[str, bool]] = {}

    def make_backend(self, settings: BackendSettings) -> SimulatedBackend:
        return SimulatedBackend(SimulatedOptions(replace(ALL, **self.flags)), settings)

    def used_bytes(self, backend: Any) -> int:
        return int(backend.mapped_bytes)

    def test_saved_copies_are_dropped_once_restored_or_freed(self) -> None:
        with self.opened() as opened:
            backend: Any = opened
            self.need(backend, "supports_offload")
            contents = self.populate(backend)
            backend.suspend(1)
            assert backend.saved
            backend.resume()
            assert not backend.saved
            backend.suspend(1)
            for memory in contents:
                memory.free()
            assert not backend.saved


class TestWithoutSelectiveRelease(TestSimulated):
    flags: ClassVar[dict[str, bool]] = {"supports_selective_release": False}


class TestWithoutSelectiveResume(TestSimulated):
    flags: ClassVar[dict[str, bool]] = {
        "supports_selective_release": False,
        "supports_selective_resume": False,
    }


class TestWithoutOffload(TestSimulated):
    flags: ClassVar[dict[str, bool]] = {"supports_offload": False}
