"""Faults at chosen calls of a backend's mechanism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

from sleepbackends.ledger import Block
from sleepbackends.mechanism import Mechanism
from sleepbackends.testing.device import HeldCall, InjectedFault

CALL_STEPS = ("synchronize", "check_room_to_save", "reserve", "map", "fill", "unmap")
"""Steps that fail when they are called."""

ITERATOR_STEPS = ("save", "restore")
"""Steps that fail after some blocks have been yielded."""

_TOGETHER = ("batches", "map_all", "unmap_all")

STEPS = CALL_STEPS + ITERATOR_STEPS
"""Every step of a mechanism that may fail. ``forget`` and ``release`` must not."""


def steps_of(backend: Any) -> Any:
    """Return the mechanism behind a backend: itself, or what it wraps as ``inner``.

    None if it does not stand on ``BaseBackend``, so that its steps are not known.
    """
    while backend is not None and not isinstance(backend, Mechanism):
        backend = getattr(backend, "inner", None)
    return backend


@contextmanager
def hold_step(backend: Any, step: str) -> Iterator[HeldCall]:
    """Make a step of a backend's mechanism wait until it is let go, or the block ends."""
    steps, held = steps_of(backend), HeldCall()
    real, before = getattr(steps, step), vars(steps).get(step)
    together = _one_by_one(steps)

    def call(*args: Any) -> Any:
        held.enter()
        return real(*args)

    setattr(steps, step, call)
    try:
        yield held
    finally:
        for name, replaced in {**together, step: before}.items():
            _put_back(steps, name, replaced)
        held.let_go()


def _one_by_one(steps: Any) -> dict[str, Any]:
    """Have each block mapped and unmapped by a call of its own; return what was there before."""
    before = {name: vars(steps).get(name) for name in _TOGETHER}
    for name in _TOGETHER:
        setattr(steps, name, partial(getattr(Mechanism, name), steps))
    return before


def _put_back(steps: Any, step: str, before: Any) -> None:
    """Undo the replacement of a step, which somebody else may have replaced before."""
    if before is None:
        delattr(steps, step)
    else:
        setattr(steps, step, before)


class FaultInjector:
    """Makes chosen calls of a backend's mechanism raise, as long as it is entered.

    A step fails before it has done anything, which is what the mechanism's contract asks
    of a step that raises. An iterator step counts the blocks it yields.

    Parameters
    ----------
    backend : BaseBackend
        The backend to disturb; for a wrapper, what it wraps as ``inner`` is disturbed.
    faults : mapping of str to collection of int
        For each step, which of its calls (or yields) fail, counted from 0.
    make_error : callable, optional
        Makes the exception from a message.

    Raises
    ------
    ValueError
        If there is no such step, or the backend has no steps that are known.
    """

    def __init__(
        self,
        backend: Any,
        faults: Mapping[str, Collection[int]],
        make_error: Callable[[str], Exception] = InjectedFault,
    ) -> None:
        unknown = set(faults) - set(STEPS)
        if unknown:
            raise ValueError(f"no such steps: {sorted(unknown)}; known: {STEPS}")
        self.backend = steps_of(backend)
        if self.backend is None:
            raise ValueError(f"{type(backend).__name__} does not stand on BaseBackend")
        self.faults = {step: frozenset(calls) for step, calls in faults.items()}
        self.make_error = make_error
        self.calls: Counter[str] = Counter()
        self.fired = 0
        self._before: dict[str, Any] = {}

    def __enter__(self) -> FaultInjector:
        self._before = {step: vars(self.backend).get(step) for step in STEPS}
        self._before |= _one_by_one(self.backend)
        for step in STEPS:
            wrap = self._iterating if step in ITERATOR_STEPS else self._calling
            setattr(self.backend, step, wrap(step, getattr(self.backend, step)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for step, before in self._before.items():
            _put_back(self.backend, step, before)

    def _count(self, step: str) -> None:
        call = self.calls[step]
        self.calls[step] += 1
        if call in self.faults.get(step, ()):
            self.fired += 1
            raise self.make_error(f"{step} was told to fail at call {call}")

    def _calling(self, step: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._count(step)
            return real(*args)

        return call

    def _iterating(self, step: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def iterate(*args: Any) -> Iterator[Any]:
            items = real(*args)
            try:
                for item in items:
                    for block in [item] if isinstance(item, Block) else item:
                        self._count(step)
                        yield block
            finally:
                items.close()

        return iterate
