"""The contract suite for the backends of this package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

from sleepbackends.hostmemory.rollup import rollup_bytes
from sleepbackends.testing.installed import InstalledBackendTests
from sleepbackends.testing.memory import ObservedMemory


class HostTests(InstalledBackendTests):
    """The suite over memory of this process."""

    backend_name = "host"

    def used_bytes(self, backend: Any) -> int:
        """Return what the kernel says this process holds without a file behind it.

        Unlike the resident set, this does not move when others map the same libraries.
        """
        return rollup_bytes("Anonymous")


class DeviceTests(InstalledBackendTests):
    """The suite over virtual memory of a device, which nobody else should use meanwhile."""

    __test__ = False
    # Every allocation is a block of its own, as the suite counts them.
    options: ClassVar[Mapping[str, Any]] = {"share_below_bytes": 0}

    def allocate(self, backend: Any, tag: str, size_bytes: int) -> ObservedMemory:
        """Allocate raw memory, which has no owner that goes out of scope."""
        memory = super().allocate(backend, tag, size_bytes)
        self.__dict__.setdefault("_allocated", []).append(memory)
        return memory

    def used_bytes(self, backend: Any) -> int:
        """Return what the driver says is used of the device, but for what it holds in all.

        Only differences are looked at. The memory of kernels, which are loaded at any time from
        the first region on, is always counted.
        """
        backend._have_kernels([0])
        free: int = backend._driver.free_bytes(0)
        return -free

    @pytest.fixture(autouse=True)
    def _give_back_memory(self) -> Iterator[None]:
        yield
        for memory in self.__dict__.get("_allocated", []):
            memory.free()


class CumemTests(DeviceTests):
    """The suite over CUDA virtual memory."""

    __test__ = True
    backend_name = "cumem"


class XpuTests(DeviceTests):
    """The suite over virtual memory of Intel GPUs."""

    __test__ = True
    backend_name = "xpu"
