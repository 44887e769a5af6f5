"""The gauges of several processes, in the multiprocess mode of ``prometheus_client``.

Collectors that derive at a scrape do not work there, because another process does the
scrape. So each process stores its gauges in the files of that mode. The sleep state is
stored as one number and made into one gauge for each state where it is read: four stored
ones could be read between two of their writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sleepbackends.engine_state import EngineState
from sleepbackends.metrics.gauges import Engines
from sleepbackends.metrics.names import (
    BY_DEPTH,
    FAULTED,
    SERVING,
    SLEEP_STATE,
    SLEEP_STATE_CODE,
    TAG_BYTES,
    one_hot,
    readings,
)

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

_STORED = (SLEEP_STATE_CODE, SERVING, FAULTED, TAG_BYTES)


def is_on() -> bool:
    """Tell whether this process is in multiprocess mode."""
    return bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))


class StoredGauges:
    """Stores the gauges of this process and exports those of all.

    Parameters
    ----------
    engines : callable
        Tells which engines this process has.
    registry : CollectorRegistry
        What is exported: whatever any process has stored.
    """

    def __init__(self, engines: Engines, registry: CollectorRegistry) -> None:
        from prometheus_client import Gauge
        from prometheus_client.multiprocess import MultiProcessCollector

        self._engines = engines
        self._gauges = {
            metric.name: Gauge(
                metric.name,
                metric.help,
                ["engine", *metric.labels],
                registry=None,
                multiprocess_mode=metric.mode,
            )
            for metric in _STORED
        }
        self._files = MultiProcessCollector(None)  # type: ignore[no-untyped-call]
        registry.register(self)

    def store(self, engine: str, state: EngineState) -> None:
        """Store what one engine is like now."""
        code = BY_DEPTH.index(state.sleep_state)
        self._gauges[SLEEP_STATE_CODE.name].labels(engine).set(code)
        for metric, labels, value in readings(state):
            if metric.name in self._gauges:
                self._gauges[metric.name].labels(engine, *labels).set(value)

    def describe(self) -> Iterable[Metric]:
        """Name nothing: what there is depends on the other processes."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Merge what all processes have stored, this one's brought up to date first."""
        for engine, state in self._engines().items():
            self.store(engine, state())
        for metric in self._files.collect():  # type: ignore[no-untyped-call]
            yield _as_states(metric) if metric.name == SLEEP_STATE_CODE.name else metric


def _as_states(codes: Metric) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    states = GaugeMetricFamily(
        SLEEP_STATE.name, SLEEP_STATE.help, labels=["engine", *SLEEP_STATE.labels]
    )
    for sample in codes.samples:
        for _, labels, value in one_hot(BY_DEPTH[int(sample.value)]):
            states.add_metric([sample.labels["engine"], *labels], value)
    return states
