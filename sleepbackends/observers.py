"""Who is told of each transition, without being able to disturb it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from sleepbackends.engine_state import EngineReport
from sleepbackends.state import BackendState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One call to an orchestrator that has ended.

    Parameters
    ----------
    operation : str
        ``"sleep"``, ``"wake_up"``, ``"release"`` or ``"mark_valid"``.
    before : BackendState or None
        What was where when it began; None if it never did.
    report : EngineReport or None
        What it did; None if it raised.
    error : BaseException or None
        What it raised; None if it did not.
    seconds : float
        How long it took, without waiting for its turn; if it never began, how long it
        waited.
    """

    operation: str
    before: BackendState | None
    report: EngineReport | None
    error: BaseException | None
    seconds: float


Observer = Callable[[Observation], None]


class Observers:
    """Calls each observer after each transition, in the thread that made it.

    A transition that had begun is observed before the next one can begin, so observers
    see them in order. They must be quick and must not start a transition. What one raises
    is logged and otherwise ignored.
    """

    def __init__(self) -> None:
        self._observers: tuple[Observer, ...] = ()

    def add(self, observer: Observer) -> None:
        """Tell it of every transition that ends from now on."""
        self._observers = (*self._observers, observer)

    def remove(self, observer: Observer) -> None:
        """Tell it of nothing more; one that was never added is ignored."""
        self._observers = tuple(known for known in self._observers if known != observer)

    def notify(self, observation: Observation) -> None:
        """Tell them all."""
        for observer in self._observers:
            try:
                observer(observation)
            except Exception:
                logger.exception(
                    "an observer of %s raised; the transition stands", observation.operation
                )
