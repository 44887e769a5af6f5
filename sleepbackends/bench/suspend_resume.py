"""Compare suspend and resume with the peers' allocators and with plain pinned copies.

In one run on one machine: plain copies, which give the link, and each allocator, each in a
process of its own, on the same workload: weights that a suspend keeps, a KV cache that it
drops. What is short, and so depends on the state of the machine, is measured in one process and
in turn too.
"""

from __future__ import annotations

import dataclasses
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from sleepbackends.bench.machine import machine
from sleepbackends.bench.peers import missing
from sleepbackends.bench.request import DESCRIBE, FIRST_TIME, Request, Spec
from sleepbackends.bench.rows import OURS, PLAIN_COPY, Row, link_rates
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.errors import BackendUnavailableError, RequestError
from sleepbackends.interpreter import JsonLines, python_command

GIB = 1 << 30

POLL_S = 0.1
"""How often it is seen whether there are new rows."""


class Watch(Protocol):
    """Follows a run; called in order, from one thread."""

    def begin(self, spec: Spec, number: int, count: int) -> None:
        """Learn that a process begins, which is number so much, counted from 1, of so many."""
        ...

    def row(self, row: Row) -> None:
        """Take a row of it."""
        ...

    def end(self, spec: Spec, problem: str) -> None:
        """Learn that it has ended, and what went wrong if anything."""
        ...


Result = dict[str, Any]
"""``machine``, what the figures were measured with; ``link`` in GiB/s; ``skipped``, what was not
measured to the end and why; ``rows``. It can be written as JSON."""


def measure(
    request: Request, watch: Watch, keep: Callable[[Result], object] = lambda result: None
) -> Result:
    """Measure everything that was asked for and can be measured.

    Parameters
    ----------
    request : Request
        What to measure.
    watch : Watch
        Who follows.
    keep : callable
        Is given what is known so far after each process, and where this is cut, so that nothing
        is lost.

    Returns
    -------
    result : Result
        Everything there is to report.

    Raises
    ------
    BackendUnavailableError
        If there is no GPU, or it cannot be used; nothing was measured.
    RequestError
        If the machine is too small for what was asked; nothing was measured.
    """
    described = _describe(request)
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    host_gib = 2 * max(request.weights_gib) * request.devices + 8
    first = Spec(FIRST_TIME, host_gib, devices=request.devices)
    if problem := run(first, request.timeout_s, lambda _: None):
        skipped[FIRST_TIME] = problem
    specs = []
    for spec in request.specs():
        possible, whys = _possible(spec, request.peers)
        skipped |= whys
        if possible is not None:
            specs.append(possible)

    def take(values: dict[str, Any]) -> None:
        rows.append(Row(**values))
        watch.row(rows[-1])

    facts = machine(described, request)
    not_yet = {spec.title: "the run ended before" for spec in specs}

    def result() -> Result:
        return {
            "machine": facts,
            "link": link_rates(rows),
            "skipped": {**skipped, **not_yet},
            "rows": [row.to_json() for row in rows],
        }

    try:
        for number, spec in enumerate(specs, 1):
            watch.begin(spec, number, len(specs))
            problem = run(spec, request.timeout_s, take)
            del not_yet[spec.title]
            if problem:
                skipped[spec.title] = problem
            watch.end(spec, problem)
            keep(result())
    except BaseException:
        keep(result())
        raise
    return result()


def _possible(spec: Spec, folder: Path | None) -> tuple[Spec | None, dict[str, str]]:
    """Leave out what is missing: return what can be measured, if anything, and why not the rest."""
    if not spec.among:
        why = missing(spec.peer, folder)
        return (None, {spec.peer: why}) if why else (spec, {})
    whys = {peer: why for peer in spec.among if (why := missing(peer, folder))}
    there = [peer for peer in spec.among if peer not in whys]
    if len(there) < 2:
        return None, {**whys, spec.title: "there is nobody to take turns with"}
    return dataclasses.replace(spec, among=there), whys


def has_failed(result: Mapping[str, Any]) -> bool:
    """Tell whether ours or a plain copy was not measured to the end."""
    return any(name.startswith((OURS, PLAIN_COPY)) for name in result["skipped"])


def _describe(request: Request) -> dict[str, Any]:
    found = CumemBackend.probe()
    if not found.ok:
        raise BackendUnavailableError(
            f"nothing can be measured here: {found.reason}", hint=found.hint
        )
    answers: list[dict[str, Any]] = []
    problem = run(Spec(DESCRIBE), request.timeout_s, answers.append)
    described = answers[0] if answers else {}
    problem = problem or described.get("problem", "")
    if problem:
        raise BackendUnavailableError(
            f"nothing can be measured here: {problem}",
            hint=described.get("hint", "sleepbackends doctor says what this machine has"),
        )
    if described["gpu_count"] < request.devices:
        raise RequestError(
            f"{request.devices} devices cannot be measured: there is one CUDA device",
            hint="CUDA_VISIBLE_DEVICES says which are seen",
        )
    if described["gpu_gib"] < request.device_gib:
        raise RequestError(
            f"{request.device_gib:g} GiB do not fit: {described['gpu']} has "
            f"{described['gpu_gib']:g} GiB",
            hint="ask for less with --weights-gib and --kv-gib",
        )
    return described


def run(spec: Spec, timeout_s: float, take: Callable[[dict[str, Any]], None]) -> str:
    """Measure in a process of its own, which has ended when this returns or raises.

    Parameters
    ----------
    spec : Spec
        What to measure.
    timeout_s : float
        How long the process may take.
    take : callable
        Is given each row as soon as it is known.

    Returns
    -------
    problem : str
        What went wrong, or nothing.
    """
    with tempfile.TemporaryDirectory(prefix="sleepbackends-bench-") as scratch:
        path, errors = Path(scratch) / "rows", Path(scratch) / "errors"
        path.touch()
        with path.open() as file, errors.open("wb") as error_file:
            rows = JsonLines(file, take)
            process = subprocess.Popen(  # noqa: S603 - runs a module beside this one
                python_command("sleepbackends.bench.workload", spec.to_json(), str(path)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=error_file,
            )
            try:
                in_time = _wait(process, time.monotonic() + timeout_s, rows.read)
            finally:
                process.kill()
                process.wait()
                rows.read()
        if not in_time:
            return f"not done after {timeout_s:g} s"
        if process.returncode:
            lines = errors.read_text(errors="replace").strip().splitlines() or ["no message"]
            return f"exit code {process.returncode}: {lines[-1]}"
    return ""


def _wait(
    process: subprocess.Popen[bytes], deadline: float, meanwhile: Callable[[], object]
) -> bool:
    while time.monotonic() < deadline:
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            meanwhile()
        else:
            return True
    return False
