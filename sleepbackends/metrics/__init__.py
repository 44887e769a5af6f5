"""Prometheus metrics of engines: what is where now, and what their transitions did.

Importing this needs nothing; a ``Metrics`` needs ``prometheus_client``, which
``pip install 'sleepbackends[server]'`` brings.
"""

from __future__ import annotations

from sleepbackends.metrics.exporter import Metrics
from sleepbackends.metrics.names import METRIC_NAMES

__all__ = ["METRIC_NAMES", "Metrics"]
