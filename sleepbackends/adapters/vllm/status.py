"""What a worker tells about its memory, in types that cross to any process."""

from __future__ import annotations

from typing import Any

from sleepbackends.engine_state import EngineReport
from sleepbackends.orchestrator import Orchestrator
from sleepbackends.residency import Residency

_GIB = 1 << 30


def describe(orchestrator: Orchestrator, last: EngineReport | None) -> dict[str, Any]:
    """Tell what is where and what the last call did.

    Returns
    -------
    status : dict
        ``backend`` (name), ``capabilities`` (names of those that it has), ``tags`` (for each
        the bytes in each residency and the ``epoch``), ``last`` (what the last call did, or
        None).
    """
    tags = {}
    for name, tag in orchestrator.backend.state().tags.items():
        tags[name] = {f"{each.value}_bytes": tag.bytes_in(each) for each in Residency}
        tags[name]["epoch"] = tag.epoch
    return {
        "backend": orchestrator.backend.name,
        "capabilities": list(orchestrator.capabilities.supported()),
        "tags": tags,
        "last": None if last is None else _plain(last),
    }


def _plain(report: EngineReport) -> dict[str, Any]:
    return {
        "operation": report.operation,
        "changed": report.changed,
        "strategy": report.strategy.value if report.strategy else None,
        "degraded": report.degraded,
        "reason": report.reason,
        "released_bytes": report.released_bytes,
        "copied_bytes": sum(step.copied_bytes for step in report.steps),
        "link_bytes": sum(step.link_bytes for step in report.steps),
        "undefined_tags": sorted(report.undefined_tags),
        "seconds": report.seconds,
    }


def sentence(report: EngineReport) -> str:
    """Say in one line what a call did."""
    moved = report.released_bytes
    copied = sum(step.copied_bytes for step in report.steps)
    text = (
        f"{report.operation} by {report.backend}: {'released' if moved >= 0 else 'took'} "
        f"{abs(moved) / _GIB:.2f} GiB and copied {copied / _GIB:.2f} GiB in {report.seconds:.3f} s"
    )
    if report.degraded:
        text += f"; degraded: {report.reason}"
    return text
