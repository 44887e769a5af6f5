"""What is measured of some ranks: plain copies, every kind of sleep, and one rank that fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.scaling.layouts import Ranks
from benchmarks.scaling.links import (
    DEVICE_STEPS,
    HOST_STEPS,
    all_seconds,
    each_seconds,
    size_bytes,
    times,
)
from benchmarks.scaling.rank import LAST
from benchmarks.scaling.spec import GIB, WHOLE_PROCESS, Emit, Row, Spec
from sleepbackends import Orchestrator, RankLostError, SleepBackendsError, SleepConfig

PLAIN_ALONE, PLAIN_AT_ONCE = "alone_", "at_once_"
"""What the cases of plain steps begin with: one rank after another, or all together."""

CASES = {
    "first": "suspend, the weights saved for the first time",
    "dirty": "suspend, every byte of the weights changed",
    "clean": "suspend, nothing changed",
    "staged": "suspend, every byte changed and staged since",
    "resume": "resume",
    "release_kv": "release of the KV cache",
    "resume_kv": "resume of the KV cache",
}

FAULTS = [
    ("suspend", "synchronize", 0),
    ("suspend", "check_room_to_save", 0),
    ("suspend", "save", 0),
    ("suspend", "unmap", 0),
    ("suspend", "unmap", LAST),
    ("resume", "reserve", 0),
    ("resume", "map", 0),
    ("resume", "restore", 0),
    ("resume", "fill", 0),
    ("resume", "synchronize", 0),
]
"""Verb, step of the mechanism and which of its calls fails; the last unmapping cannot be undone."""

KILLED = "killed while it saves"
AWAKE, ASLEEP, DIFFERENT = "all awake", "all asleep", "DIFFERENT"


class Measurement:
    """Goes through the cases of one process.

    Parameters
    ----------
    ranks : Ranks
        Whose memory is moved.
    spec : Spec
        What to measure.
    emit : Emit
        Is given each row.
    tell : callable
        Is given what was found out about the ranks, before one of them is made to fail.
    """

    def __init__(
        self, ranks: Ranks, spec: Spec, emit: Emit, tell: Callable[[list[dict[str, Any]]], None]
    ) -> None:
        self._ranks = ranks
        self._spec = spec
        self._emit = emit
        self._tell = tell
        self._changes = 0

    def run(self) -> None:
        """Measure everything.

        Raises
        ------
        ContentsLostError, RuntimeError
            If the weights of a rank are not what they were.
        """
        facts = self._ranks.call("facts")
        if not self._whole_process:
            self._plain()
        for rank in range(self._ranks.count):
            self._ranks.call_on(rank, "load")
        with Orchestrator(
            self._ranks.group, config=SleepConfig(timeout_s=self._spec.timeout_s)
        ) as orchestrator:
            for number in range(self._spec.rounds):
                self._round(orchestrator, number)
            for fact, arena in zip(facts, self._ranks.call("arena"), strict=True):
                fact["arena_gib"] = {f"node {node}": size / GIB for node, size in arena.items()}
            self._tell(facts)
            if self._spec.faults and not self._whole_process and self._spec.layout != "single":
                self._faults(orchestrator)

    @property
    def _whole_process(self) -> bool:
        return WHOLE_PROCESS in self._spec.backend

    def _row(self, case: str, number: int, seconds: float, **more: Any) -> None:
        spec = self._spec
        self._emit(Row(spec.layout, spec.backend, spec.ranks, case, number, seconds, **more))

    # Plain steps

    def _plain(self) -> None:
        steps = DEVICE_STEPS if self._spec.on_gpus else HOST_STEPS
        for number in range(self._spec.rounds):
            alone = [partial(self._ranks.call_on, rank, "link") for rank in range(self._spec.ranks)]
            found = [_through(call, steps) for call in alone]
            for step in steps:
                seconds = [span[1] - span[0] for span in (each[step] for each in found)]
                self._plain_row(PLAIN_ALONE, step, number, max(seconds), seconds)
            together = _through(partial(self._ranks.call, "link"), steps)
            for step, spans in together.items():
                self._plain_row(
                    PLAIN_AT_ONCE, step, number, all_seconds(spans), each_seconds(spans)
                )

    def _plain_row(
        self, kind: str, step: str, number: int, seconds: float, each: list[float]
    ) -> None:
        size = size_bytes(self._spec) * (times(self._spec) if step.startswith("copy") else 1)
        self._row(kind + step, number, seconds, rank_seconds=each, size_bytes=size)

    # Every kind of sleep

    def _change(self) -> None:
        self._changes += 1
        self._ranks.call("change", self._changes)

    def _round(self, orchestrator: Orchestrator, number: int) -> None:
        self._change()
        self._cycle(orchestrator, "dirty" if number else "first", number)
        self._cycle(orchestrator, "clean", number, resume=False)
        self._change()
        if all(self._ranks.call("stage")):
            self._cycle(orchestrator, "staged", number, resume=False)
        kv_bytes = int(self._spec.kv_gib * GIB)
        if kv_bytes:
            self._timed("release_kv", number, orchestrator.release_kv_cache, kv_bytes)
            self._timed("resume_kv", number, orchestrator.wake_up, kv_bytes)

    def _cycle(
        self, orchestrator: Orchestrator, case: str, number: int, *, resume: bool = True
    ) -> None:
        size = self._spec.weights_bytes
        self._timed(case, number, orchestrator.sleep, size)
        if resume:
            self._timed("resume", number, orchestrator.wake_up, size)
        else:
            orchestrator.wake_up()
        self._ranks.call("check")

    def _timed(self, case: str, number: int, call: Callable[[], Any], size: int) -> None:
        started = time.perf_counter()
        report = call()
        seconds = time.perf_counter() - started
        step = report.steps[-1]
        self._row(
            case,
            number,
            seconds,
            rank_seconds=[rank.seconds for _, rank in sorted(step.ranks.items())],
            size_bytes=size,
            copied_bytes=step.copied_bytes,
            phases=dict(step.phases),
        )

    # One rank that fails

    def _faults(self, orchestrator: Orchestrator) -> None:
        last = self._ranks.count - 1
        calls: dict[str, Callable[[], Any]] = {
            "suspend": orchestrator.sleep,
            "resume": orchestrator.wake_up,
        }
        for number, (verb, step, at) in enumerate(FAULTS):
            self._change()
            if verb == "resume":
                orchestrator.sleep()
            self._ranks.call_on(last, "break_at", {step: [at]})
            name = f"{verb}: {step}{' of the last block' if at == LAST else ''}"
            self._fails(name, number, calls[verb])
            if self._ranks.call_on(last, "break_at", {}) != 1:
                raise RuntimeError(f"{name} was never made to fail")
            orchestrator.wake_up()
            self._ranks.call("check")
        if self._ranks.in_processes and last:
            self._change()
            self._ranks.call_on(last, "die_at_save")
            self._fails(f"suspend: {KILLED}", len(FAULTS), orchestrator.sleep)

    def _fails(self, name: str, number: int, call: Callable[[], Any]) -> None:
        started = time.perf_counter()
        lost = False
        try:
            call()
        except SleepBackendsError as error:
            lost = isinstance(error, RankLostError)
        else:
            raise RuntimeError(f"{name}: the transition went well")
        seconds = time.perf_counter() - started
        if lost:
            self._ranks.group.forget_lost()
        # What was heard of the others may be older than what they did.
        self._ranks.group.refresh()
        self._row(name, number, seconds, outcome=self._outcome())

    def _outcome(self) -> str:
        states = self._ranks.group.state().ranks.values()
        if not states:
            return DIFFERENT
        if all(state.asleep_bytes == 0 for state in states):
            return AWAKE
        if all(state.mapped_bytes == 0 for state in states):
            return ASLEEP
        return DIFFERENT


def _through(call: Callable[[str], Any], steps: tuple[str, ...]) -> dict[str, Any]:
    """Open links, go through the steps one after another, close the links; return the spans."""
    call("open")
    try:
        return {step: call(step) for step in steps}
    finally:
        call("close")


def expected(case: str) -> str:
    """Return where all ranks have to be after one has failed."""
    return AWAKE if case.startswith("suspend") else ASLEEP


def is_fault(case: str) -> bool:
    """Tell whether a case is of a rank that fails."""
    return ": " in case
