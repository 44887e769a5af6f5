"""The contract suite on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.settings import BackendSettings
from sleepbackends.testing import BackendContractTests, ObservedMemory


class TestCumem(BackendContractTests):
    # 200 sequences run over the simulated driver; here the driver is what is under test.
    random_settings = settings(BackendContractTests.random_settings, max_examples=40)

    def make_backend(self, settings: BackendSettings) -> CumemBackend:
        # Every allocation is a block of its own, as the suite counts them.
        return CumemBackend(CumemOptions(share_below_bytes=0), settings)

    def allocate(self, backend: Any, tag: str, size_bytes: int) -> ObservedMemory:
        memory = super().allocate(backend, tag, size_bytes)
        self.__dict__.setdefault("_allocated", []).append(memory)
        return memory

    @pytest.fixture(autouse=True)
    def give_back_memory(self) -> Iterator[None]:
        """Raw memory has no owner that goes out of scope."""
        yield
        for memory in self.__dict__.get("_allocated", []):
            memory.free()

    def used_bytes(self, backend: Any) -> int:
        """Of the whole device: these tests have it to themselves."""
        free, total = torch.cuda.mem_get_info()
        return total - free
