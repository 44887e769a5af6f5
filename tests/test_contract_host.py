"""The contract suite over real memory of this process."""

from __future__ import annotations

from typing import Any

from sleepbackends.host.backend import HostBackend
from sleepbackends.host.options import HostOptions
from sleepbackends.hostmemory.rollup import rollup_bytes
from sleepbackends.settings import BackendSettings
from sleepbackends.testing import BackendContractTests


class TestHost(BackendContractTests):
    def make_backend(self, settings: BackendSettings) -> HostBackend:
        return HostBackend(HostOptions(), settings)

    def used_bytes(self, backend: Any) -> int:
        """What the kernel says this process holds without a file behind it.

        Unlike the resident set, this does not move when others map the same libraries.
        """
        return rollup_bytes("Anonymous")
