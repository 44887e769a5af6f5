from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.availability import Availability
from sleepbackends.bench import suspend_resume
from sleepbackends.bench.peers import PACKAGES
from sleepbackends.bench.request import DESCRIBE, FIRST_TIME, Spec
from sleepbackends.bench.rows import (
    BOTH_DEVICES,
    CASES,
    IN_TURN,
    OURS,
    PLAIN_COPY,
    STAGED,
    Row,
)
from sleepbackends.cumem.backend import CumemBackend

SECONDS = {PLAIN_COPY: 0.3, OURS: 0.32, IN_TURN: 0.02, "vllm": 0.48, "tms": 6.4, "tms_retain": 0.4}
MACHINE = {"gpu": "Made-up 9000", "gpu_gib": 141.0, "gpu_count": 2}


def measured(spec: Spec) -> list[Row]:
    """Rows as a process would write them: the rounds take 1, 2 and 3 times the least."""
    if spec.peer == IN_TURN:
        turns = ("resume", "suspend_clean") if spec.weights_gib else ("discard_kv", "resume_kv")
        kinds = [(peer, case) for peer in spec.among for case in turns]
        specs = {peer: dataclasses.replace(spec, peer=peer) for peer, _ in kinds}
        return [
            specs[peer].row(case, n, SECONDS[IN_TURN]) for n in range(3) for peer, case in kinds
        ]
    if spec.peer == STAGED:
        spec = dataclasses.replace(spec, peer=OURS)
        return [spec.row("suspend_first_staged", n, 0.01 * (n + 1)) for n in range(3)]
    others = ("staged",) if spec.peer == OURS else ("staged", "1pct", "clean")
    cases = [case for case in CASES if not case.endswith(others)]
    if spec.peer == PLAIN_COPY:
        cases = ["suspend_dirty", "resume"]
    devices = ("0",) if spec.devices == 1 else ("0", "1", BOTH_DEVICES)
    base = SECONDS[spec.peer] / 2 * (spec.weights_gib / 16)
    return [
        spec.row(case, number, base * (number + 1), name)
        for number in range(3)
        for case in cases
        for name in devices
    ]


def result_of(*rows: Row, skipped: dict[str, str] | None = None) -> dict[str, Any]:
    """A result as it is read from a file."""
    return {
        "machine": MACHINE,
        "rows": [row.to_json() for row in rows],
        "skipped": skipped or {},
    }


class Silent:
    """Watches and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def begin(self, spec: Spec, number: int, count: int) -> None:
        self.told.append((f"{number}/{count}", spec.title))

    def row(self, row: Row) -> None:
        self.told.append(("row", row.case))

    def end(self, spec: Spec, problem: str) -> None:
        self.told.append(("end", problem))


Take = Callable[[dict[str, Any]], None]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Spec]:
    """Replaces the processes; what they were to measure is kept here."""
    specs: list[Spec] = []

    def run(spec: Spec, timeout_s: float, take: Take) -> str:
        if spec.peer == DESCRIBE:
            take(dict(MACHINE))
            return ""
        if spec.peer == FIRST_TIME:
            return ""
        specs.append(spec)
        for row in measured(spec):
            take(row.to_json())
        return ""

    monkeypatch.setattr(suspend_resume, "run", run)
    monkeypatch.setattr(CumemBackend, "probe", lambda: Availability(True))
    return specs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of peers."""
    for package in PACKAGES.values():
        (tmp_path / package.folder / package.needed).mkdir(parents=True, exist_ok=True)
    information = tmp_path / "tms" / "torch_memory_saver-1.2.3.dist-info"
    information.mkdir()
    text = "Metadata-Version: 2.1\nName: torch_memory_saver\nVersion: 1.2.3\n"
    (information / "METADATA").write_text(text)
    return tmp_path
