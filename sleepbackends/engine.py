"""What the orchestrator asks of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

QuiesceMode = Literal["wait", "abort", "keep"]
"""What happens to running requests: finish them, abort them, or freeze them as they are."""


@dataclass(frozen=True, kw_only=True)
class EngineHooks:
    """Callbacks into the engine; every one is optional.

    A hook that raises leaves the engine FAULTED and not serving, with the memory as the
    state says and the transition retryable: the hooks that are still owed run again. A hook
    must not start a transition.

    Parameters
    ----------
    quiesce : callable(mode, deadline_s), optional
        Stop serving. ``deadline_s`` is the number of seconds left, or None. Called before
        anything is released, and not again while the engine is quiet.
    unquiesce : callable(), optional
        Serve again. Called only once everything needed is resident and valid.
    drop_caches : callable(tags), optional
        Forget whatever was computed from the contents of these tags (a prefix cache).
        Called after the contents were dropped, before anything else may happen.
    reload : callable(tags), optional
        Refill the memory of these tags in place (load the weights again). What it returns
        from is taken as valid.
    teardown_communicators : callable(), optional
        Called before memory is released where the backend does not preserve communicators.
    rebuild_communicators : callable(), optional
        Called after memory is back, in the same case.
    recapture_graphs : callable(only_with_communicators), optional
        Capture graphs again: all of them where addresses were not preserved, otherwise
        those that contain collectives.
    recompile : callable(), optional
        Called where compiled artefacts did not survive.
    """

    quiesce: Callable[[QuiesceMode, float | None], object] | None = None
    unquiesce: Callable[[], object] | None = None
    drop_caches: Callable[[frozenset[str]], object] | None = None
    reload: Callable[[frozenset[str]], object] | None = None
    teardown_communicators: Callable[[], object] | None = None
    rebuild_communicators: Callable[[], object] | None = None
    recapture_graphs: Callable[[bool], object] | None = None
    recompile: Callable[[], object] | None = None

    @classmethod
    def of(cls, engine: Any) -> EngineHooks:
        """Take the hooks from an object's methods of the same names, as far as it has them."""
        found = {field.name: getattr(engine, field.name, None) for field in fields(cls)}
        return cls(**{name: hook for name, hook in found.items() if callable(hook)})
