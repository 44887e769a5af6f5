"""What an author of a backend provides, and what every contract test uses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sleepbackends.base import BaseBackend
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.residency import Residency
from sleepbackends.settings import BackendSettings
from sleepbackends.testing.memory import BufferMemory, ObservedMemory

PAGE = 4096
SIZES = {"weights": (3 * PAGE + 17, PAGE), "kv_cache": (2 * PAGE, 5), "lora": (PAGE + 1,)}
"""Odd sizes, because whole pages hide mistakes at the end of a block."""


class ContractFixtures:
    """Three methods to provide; only the first has no default."""

    def make_backend(self, settings: BackendSettings) -> BaseBackend[Any]:
        """Create a fresh backend. Called often; closed by the suite."""
        raise NotImplementedError("a contract test class must define make_backend(settings)")

    def allocate(self, backend: Any, tag: str, size_bytes: int) -> ObservedMemory:
        """Allocate under a tag.

        The default works for a region that has ``buffer(size_bytes)`` and returns a
        writable buffer, or an object that has ``read`` and ``write`` itself.
        """
        with backend.region(tag) as region:
            memory: Any = region.buffer(size_bytes)
        observed: ObservedMemory = memory if hasattr(memory, "write") else BufferMemory(memory)
        return observed

    def used_bytes(self, backend: Any) -> int | None:
        """Measure, around the backend, how much memory its allocations take up now.

        None, the default, skips the tests that need it.
        """
        return None

    # Used by the tests

    @pytest.fixture
    def backend(self) -> Iterator[BaseBackend[Any]]:
        """Give a backend with default policies, closed afterwards."""
        with self.opened() as backend:
            yield backend

    @contextmanager
    def opened(
        self, policies: Policies | None = None, **settings: Any
    ) -> Iterator[BaseBackend[Any]]:
        """Open a backend with the given policies and settings."""
        backend = self.make_backend(BackendSettings(policies=policies or Policies(), **settings))
        try:
            yield backend
        finally:
            backend.close()

    def populate(self, backend: Any, *tags: str) -> dict[ObservedMemory, bytes]:
        """Allocate and fill memory under the tags; return what it holds.

        It stays alive until the end of the test, or until it is freed.
        """
        source = random.Random(7)  # noqa: S311 - test data, not a secret
        contents = {}
        for tag in tags or SIZES:
            for size in SIZES[tag]:
                memory = self.allocate(backend, tag, size)
                contents[memory] = source.randbytes(size)
                memory.write(contents[memory])
        self.__dict__.setdefault("_alive", []).extend(contents)
        return contents

    @staticmethod
    def check(contents: dict[ObservedMemory, bytes]) -> None:
        """Check that each memory holds what it should."""
        for memory, expected in contents.items():
            assert memory.read() == expected, "bytes differ from what was kept"

    @staticmethod
    def residency(backend: Any, tag: str) -> Residency:
        """Return the one residency of a tag."""
        (only,) = backend.state().tags[tag].residencies
        residency: Residency = only
        return residency

    @staticmethod
    def need(backend: Any, *flags: str) -> None:
        """Skip unless the backend has these capabilities."""
        missing = backend.capabilities.missing(flags)
        if missing:
            pytest.skip(f"{backend.name}: {', '.join(missing)} is False")

    @staticmethod
    def need_not(backend: Any, flag: str) -> None:
        """Skip if the backend has this capability: the refusal is under test."""
        if getattr(backend.capabilities, flag):
            pytest.skip(f"{backend.name}: {flag} is True")


def policies(**tags: str) -> Policies:
    """Make policies with the same answer at both levels."""
    return Policies({tag: TagPolicy(Policy(p), Policy(p)) for tag, p in tags.items()})
