"""The exporter: which engines it observes, and what it counts about their transitions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from sleepbackends.engine_state import EngineState
from sleepbackends.errors import (
    BusyError,
    ClosedError,
    ConfigurationError,
    RequestError,
    TransitionCancelledError,
    UnsupportedOperationError,
)
from sleepbackends.metrics import multiprocess
from sleepbackends.metrics.gauges import DerivedGauges
from sleepbackends.metrics.names import CLEAN, COPIED, DEGRADED, FAILED, SECONDS, Metric
from sleepbackends.observers import Observation, Observer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from sleepbackends.orchestrator import Orchestrator

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the duration histogram, in seconds."""

_COUNTED = ("sleep", "wake_up", "release")
_REFUSALS = (RequestError, UnsupportedOperationError, BusyError, ClosedError)


class Metrics:
    """Exports engines to Prometheus.

    Parameters
    ----------
    registry : CollectorRegistry, optional
        Where the metrics are registered; an own one by default. This is what to expose:
        ``prometheus_client.generate_latest(metrics.registry)``. In multiprocess mode it
        exports what any process has stored.

    Raises
    ------
    UnsupportedOperationError
        ``prometheus_client`` cannot be imported; nothing was registered.
    ConfigurationError
        The directory of its multiprocess mode is not there; nothing was registered.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Histogram
        except ImportError as error:
            raise UnsupportedOperationError(
                f"metrics need prometheus_client, which cannot be imported: {error}",
                hint="pip install 'sleepbackends[server]'",
            ) from error
        self.registry = CollectorRegistry() if registry is None else registry
        self._engines: dict[str, tuple[Orchestrator, Observer]] = {}
        self._stored: multiprocess.StoredGauges | None = None
        # In multiprocess mode what is counted goes to files, and is exported from there.
        own: CollectorRegistry | None = self.registry
        if multiprocess.is_on():
            try:
                self._stored = multiprocess.StoredGauges(self._snapshots, self.registry)
            except ValueError as error:
                raise ConfigurationError(
                    f"multiprocess mode cannot be used: {error}",
                    hint="create the directory PROMETHEUS_MULTIPROC_DIR before the first process",
                ) from error
            own = None
        else:
            DerivedGauges(self._snapshots, self.registry)

        def counter(metric: Metric) -> Counter:
            return Counter(metric.name, metric.help, ["engine", *metric.labels], registry=own)

        self._copied, self._clean = counter(COPIED), counter(CLEAN)
        self._degraded, self._failed = counter(DEGRADED), counter(FAILED)
        self._seconds = Histogram(
            SECONDS.name,
            SECONDS.help,
            ["engine", *SECONDS.labels],
            registry=own,
            buckets=BUCKETS_S,
        )

    def observe(self, orchestrator: Orchestrator, engine: str = "0") -> None:
        """Export an engine from now on.

        Parameters
        ----------
        orchestrator : Orchestrator
            The engine's. It is kept until ``forget``.
        engine : str
            The value of the label ``engine``.

        Raises
        ------
        RequestError
            An engine of this name is observed already; nothing changed.
        """
        if engine in self._engines:
            raise RequestError(
                f"engine {engine!r} is observed already; known engines: {sorted(self._engines)}",
                hint="give each engine a name of its own, or forget(engine) first",
                operation="observe",
            )
        for operation in _COUNTED:  # so that a rate is there before the first transition
            for counter in (self._copied, self._clean, self._degraded):
                counter.labels(engine, operation)
        observer = partial(self._count, engine, orchestrator)
        self._engines = {**self._engines, engine: (orchestrator, observer)}
        orchestrator.observers.add(observer)
        if self._stored is not None:
            self._stored.store(engine, orchestrator.state())

    def forget(self, engine: str) -> None:
        """Export an engine's gauges no more; what was counted of it stays.

        Raises
        ------
        RequestError
            No engine of this name is observed.
        """
        if engine not in self._engines:
            raise RequestError(
                f"engine {engine!r} is not observed; known engines: {sorted(self._engines)}",
                hint="use a name that was given to observe()",
                operation="forget",
            )
        orchestrator, observer = self._engines[engine]
        orchestrator.observers.remove(observer)
        self._engines = {name: at for name, at in self._engines.items() if name != engine}

    def _snapshots(self) -> dict[str, Callable[[], EngineState]]:
        return {name: orchestrator.state for name, (orchestrator, _) in self._engines.items()}

    def _count(self, engine: str, orchestrator: Orchestrator, seen: Observation) -> None:
        outcome = _outcome(seen)
        self._seconds.labels(engine, seen.operation, outcome).observe(seen.seconds)
        if outcome == "failed":
            self._failed.labels(engine, seen.operation, type(seen.error).__name__).inc()
        if seen.report is not None:
            steps = seen.report.steps
            at = (engine, seen.operation)
            self._copied.labels(*at).inc(sum(step.copied_bytes for step in steps))
            self._clean.labels(*at).inc(sum(step.clean_bytes for step in steps))
            self._degraded.labels(*at).inc(seen.report.degraded)
        if self._stored is not None:
            self._stored.store(engine, orchestrator.state())


def _outcome(seen: Observation) -> str:
    if seen.error is None:
        return "changed" if seen.report is not None and seen.report.changed else "unchanged"
    if isinstance(seen.error, TransitionCancelledError):
        return "cancelled"
    return "refused" if isinstance(seen.error, _REFUSALS) else "failed"
