"""The gauges of one process: derived at each scrape, never stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from sleepbackends.engine_state import EngineState
from sleepbackends.metrics.names import GAUGES, readings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import GaugeMetricFamily

Engines = Callable[[], Mapping[str, Callable[[], EngineState]]]
"""What tells, by engine, how to take a snapshot of it."""


class DerivedGauges:
    """Reads all gauges of an engine off one snapshot, whenever it is asked.

    A snapshot is in one state, so exactly one of its states is 1, whoever reads during
    whichever transition. Nothing can be forgotten, or set twice.

    Parameters
    ----------
    engines : callable
        Tells which engines there are.
    registry : CollectorRegistry
        What is exported.
    """

    def __init__(self, engines: Engines, registry: CollectorRegistry) -> None:
        self._engines = engines
        registry.register(self)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Name the gauges, so that a registry sees a collision."""
        return _families().values()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Take one snapshot of each engine."""
        families = _families()
        for engine, state in self._engines().items():
            for metric, labels, value in readings(state()):
                families[metric.name].add_metric([engine, *labels], value)
        return families.values()


def _families() -> dict[str, GaugeMetricFamily]:
    from prometheus_client.core import GaugeMetricFamily

    return {
        metric.name: GaugeMetricFamily(metric.name, metric.help, labels=["engine", *metric.labels])
        for metric in GAUGES
    }
