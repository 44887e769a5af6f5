"""The metrics by name, with their labels, and what a snapshot of an engine says of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sleepbackends.engine_state import EngineState, Status
from sleepbackends.residency import Residency
from sleepbackends.sleep_state import SleepState

Mode = Literal["livemin", "livemax", "livesum"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Parameters
    ----------
    name : str
        As it is exported.
    help : str
        One sentence.
    labels : tuple of str
        In addition to ``engine``.
    mode : str
        For a gauge, how several processes of one engine are taken together.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    mode: Mode = "livesum"


SLEEP_STATE = Metric(
    "sleepbackends_engine_sleep_state",
    "Where the engine's memory is: 1 for exactly one sleep_state, 0 for the others.",
    ("sleep_state",),
)
SLEEP_STATE_CODE = Metric(
    "sleepbackends_engine_sleep_state_code",
    "In multiprocess mode, the sleep state as a number.",
    mode="livemax",
)
SERVING = Metric(
    "sleepbackends_engine_serving", "Whether the engine admits work (1) or not (0).", mode="livemin"
)
FAULTED = Metric(
    "sleepbackends_engine_faulted",
    "Whether the engine is FAULTED: a hook of it raised.",
    (),
    "livemax",
)
TAG_BYTES = Metric(
    "sleepbackends_tag_bytes", "Bytes of memory by tag and residency.", ("tag", "residency")
)
IN_FLIGHT = Metric(
    "sleepbackends_transitions_in_flight", "Whether a transition is going on (1) or not (0)."
)

SECONDS = Metric(
    "sleepbackends_transition_seconds",
    "How long transitions took, hooks included, without waiting for their turn.",
    ("operation", "outcome"),
)
COPIED = Metric(
    "sleepbackends_transition_copied_bytes_total",
    "Bytes copied to save or restore contents.",
    ("operation",),
)
CLEAN = Metric(
    "sleepbackends_transition_clean_bytes_total",
    "Bytes that did not have to be copied, because a good copy was there.",
    ("operation",),
)
DEGRADED = Metric(
    "sleepbackends_transitions_degraded_total",
    "Transitions done in a weaker way than asked.",
    ("operation",),
)
FAILED = Metric(
    "sleepbackends_transitions_failed_total",
    "Transitions that raised after they had begun, by class of error.",
    ("operation", "error"),
)

GAUGES = (SLEEP_STATE, SERVING, FAULTED, TAG_BYTES, IN_FLIGHT)
METRIC_NAMES = tuple(metric.name for metric in (*GAUGES, SECONDS, COPIED, CLEAN, DEGRADED, FAILED))
"""Every metric that is exported; the histogram adds ``_bucket``, ``_sum`` and ``_count``."""

BY_DEPTH = (
    SleepState.AWAKE,
    SleepState.KV_CACHE_RELEASED,
    SleepState.WEIGHTS_OFFLOADED,
    SleepState.DISCARD_ALL,
)
"""The states from the one that needs least to serve again; the index is the code."""

Reading = tuple[Metric, tuple[str, ...], float]
"""A gauge, its labels after ``engine``, and its value."""


def one_hot(current: SleepState) -> Iterator[Reading]:
    """Give 1 to one state and 0 to the others."""
    for state in BY_DEPTH:
        yield SLEEP_STATE, (state.value,), float(state is current)


def readings(state: EngineState) -> Iterator[Reading]:
    """Read every gauge off one snapshot, so that they agree with each other."""
    yield from one_hot(state.sleep_state)
    yield SERVING, (), float(state.serving)
    yield FAULTED, (), float(state.status is Status.FAULTED)
    for name, tag in state.memory.tags.items():
        for residency in Residency:
            yield TAG_BYTES, (name, residency.value), float(tag.bytes_in(residency))
    yield IN_FLIGHT, (), float(bool(state.transition))
