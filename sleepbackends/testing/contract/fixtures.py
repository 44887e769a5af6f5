"""What an author of a backend provides, what may be assumed, and what every test uses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.residency import Residency
from sleepbackends.settings import BackendSettings
from sleepbackends.testing.faults import steps_of
from sleepbackends.testing.memory import BufferMemory, ObservedMemory
from sleepbackends.testing.promises import SUITE_VERSION, Promise

PAGE = 4096
SIZES = {"weights": (3 * PAGE + 17, PAGE), "kv_cache": (2 * PAGE, 5), "lora": (PAGE + 1,)}
"""Odd sizes, because whole pages hide mistakes at the end of a block."""

ASSUMPTIONS = (
    "has_steps",
    "one_block_each",
    "frees_at_once",
    "allocates_asleep",
    "many_threads",
    "side_by_side",
)
"""What tests assume beyond the contract; each is an attribute of the test class."""

Contents = dict[ObservedMemory, bytes]


class ContractFixtures:
    """Three methods to provide, only the first without a default; six assumptions to deny.

    A test that needs an ability the backend does not claim, or an assumption that is False
    here, is skipped and names it.
    """

    suite_version: ClassVar[int] = SUITE_VERSION
    """Tests that came with a later version of the suite are skipped."""

    has_steps: ClassVar[bool] = True
    """The backend stands on ``BaseBackend``, or wraps one that does as ``inner``: faults can
    be injected into its steps, and a step can be made to wait."""

    one_block_each: ClassVar[bool] = True
    """Each allocation is one block of just the size that was asked for."""

    frees_at_once: ClassVar[bool] = True
    """Memory that is freed while nothing else goes on has left the state when ``free()`` returns,
    and is given back."""

    allocates_asleep: ClassVar[bool] = True
    """Memory can be allocated while other memory sleeps."""

    many_threads: ClassVar[bool] = True
    """The backend, and what ``allocate`` does, may be used from any thread."""

    side_by_side: ClassVar[bool] = True
    """Several backends can be open in one process."""

    large_bytes: ClassVar[int] = 64 << 20
    """How much is allocated to be seen in ``used_bytes``; a suspend has to give 95 % of it
    back."""

    def make_backend(self, settings: BackendSettings) -> Any:
        """Create a fresh backend. Called often; closed by the suite."""
        raise NotImplementedError("a contract test class must define make_backend(settings)")

    def allocate(self, backend: Any, tag: str, size_bytes: int) -> ObservedMemory:
        """Allocate under a tag.

        The default works for a region that has ``buffer(size_bytes)`` and returns a
        writable buffer, or an object that has ``read`` and ``write`` itself.
        """
        self.need(backend, "owns_allocations")
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
    def backend(self) -> Iterator[Any]:
        """Give a backend with default policies, closed afterwards."""
        with self.opened() as backend:
            yield backend

    @contextmanager
    def opened(self, policies: Policies | None = None, **settings: Any) -> Iterator[Any]:
        """Open a backend with the given policies and settings."""
        backend = self.make_backend(BackendSettings(policies=policies or Policies(), **settings))
        try:
            yield backend
        finally:
            backend.close()

    def populate(self, backend: Any, *tags: str) -> Contents:
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
                self._tag_of[memory] = tag
        return contents

    @property
    def _tag_of(self) -> dict[ObservedMemory, str]:
        tags: dict[ObservedMemory, str] = self.__dict__.setdefault("_tags_of_memory", {})
        return tags

    def of(self, contents: Contents, *tags: str) -> Contents:
        """Select the memory of some tags."""
        return {m: data for m, data in contents.items() if self._tag_of[m] in tags}

    def check(self, contents: Contents) -> None:
        """Check that each memory holds what it should."""
        for memory, expected in contents.items():
            self._check_bytes(
                memory, expected, Promise.BIT_EXACT, "bytes differ from what was kept"
            )

    def check_filled(self, contents: Contents, byte: int = 0) -> None:
        """Check that each memory is filled with one byte."""
        for memory, data in contents.items():
            expected = bytes([byte]) * len(data)
            self._check_bytes(memory, expected, Promise.UNDEFINED, f"not filled with {byte:#04x}")

    def _check_bytes(
        self, memory: ObservedMemory, expected: bytes, promise: Promise, what: str
    ) -> None:
        found = memory.read()
        if found == expected:
            promise.check(True, what)
            return
        wrong = [n for n, pair in enumerate(zip(found, expected, strict=False)) if len({*pair}) > 1]
        where = f"{len(wrong)} of {len(expected)}, from offset {min(wrong, default=len(found))} on"
        tag = self._tag_of.get(memory, "of this test")
        promise.check(False, f"{what}: tag {tag!r}, {where}")

    @staticmethod
    def residency(backend: Any, tag: str) -> Residency | None:
        """Return the one residency of a tag, or None if it has several or none."""
        found = backend.state().tags[tag].residencies
        return next(iter(found)) if len(found) == 1 else None

    def check_residency(
        self, backend: Any, promise: Promise, doing: str, **expected: Residency
    ) -> None:
        """Check where the bytes of some tags are."""
        for tag, residency in expected.items():
            found = {r.value for r in backend.state().tags[tag].residencies}
            promise.check(
                found == {residency.value},
                f"after {doing} the tag {tag!r} is {sorted(found)}, not {residency.value!r}",
            )

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

    def assume(self, *assumptions: str) -> None:
        """Skip unless all of these may be assumed."""
        denied = [name for name in assumptions if not getattr(self, name)]
        if denied:
            pytest.skip(f"{', '.join(denied)} is False")

    def need_steps(self, backend: Any) -> None:
        """Skip unless faults can be injected into the backend."""
        self.assume("has_steps")
        Promise.IDENTITY.check(
            steps_of(backend),
            f"has_steps is True, and {type(backend).__name__} neither stands on BaseBackend nor "
            "has an inner backend that does",
        )

    def measure(self, backend: Any) -> int:
        """Measure the memory in use, or skip."""
        used = self.used_bytes(backend)
        if used is None:
            pytest.skip("used_bytes() is not defined")
        return used

    @staticmethod
    def keeping_level(backend: Any) -> int:
        """Return the level that keeps weights, or else the one that any backend can do."""
        return 1 if backend.capabilities.supports_offload else 2


def policies(**tags: str) -> Policies:
    """Make policies with the same answer at both levels."""
    return Policies({tag: TagPolicy(Policy(p), Policy(p)) for tag, p in tags.items()})
