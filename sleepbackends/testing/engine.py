"""An engine that only remembers which hooks were called, for tests of orchestration."""

from __future__ import annotations

from typing import Any

from sleepbackends.engine import EngineHooks, QuiesceMode


class FakeEngine:
    """Records hook calls in order, and fails those it is told to.

    Attributes
    ----------
    calls : list of tuple
        ``(hook, *arguments)`` of every call so far.
    fail : dict of str to Exception
        What the named hook raises, until the entry is removed.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, Exception] = {}

    def hooks(self, *without: str) -> EngineHooks:
        """Return this engine's hooks, leaving some out."""
        hooks = EngineHooks.of(self)
        return EngineHooks(
            **{name: hook for name, hook in vars(hooks).items() if name not in without}
        )

    def named(self) -> list[str]:
        """Return the names of the hooks called so far, and forget the calls."""
        names = [call[0] for call in self.calls]
        self.calls.clear()
        return names

    def _record(self, hook: str, *args: Any) -> None:
        self.calls.append((hook, *args))
        if hook in self.fail:
            raise self.fail[hook]

    def quiesce(self, mode: QuiesceMode, deadline_s: float | None) -> None:
        """Record the call."""
        self._record("quiesce", mode)

    def unquiesce(self) -> None:
        """Record the call."""
        self._record("unquiesce")

    def drop_caches(self, tags: frozenset[str]) -> None:
        """Record the call."""
        self._record("drop_caches", tags)

    def reload(self, tags: frozenset[str]) -> None:
        """Record the call."""
        self._record("reload", tags)

    def teardown_communicators(self) -> None:
        """Record the call."""
        self._record("teardown_communicators")

    def rebuild_communicators(self) -> None:
        """Record the call."""
        self._record("rebuild_communicators")

    def recapture_graphs(self, only_with_communicators: bool) -> None:
        """Record the call."""
        self._record("recapture_graphs", only_with_communicators)

    def recompile(self) -> None:
        """Record the call."""
        self._record("recompile")
