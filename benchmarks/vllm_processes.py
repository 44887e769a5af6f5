"""Processes with one vLLM engine each: all import at once, then one after another has its turn.

A process is a run of the same module with ``--work CASE RESULTS``. It calls ``take_turn`` once
all is imported, and notes what it finds line by line, so that what was found before it hangs
or fails is not lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.vllm_engine import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[1]
IMPORTS_S = 90.0
"""How long imports may take, beyond a turn."""


@dataclass
class Found:
    """What one process found.

    Parameters
    ----------
    rows : list of dict
        What it noted.
    problem : str
        Why it did not come to its end; empty if it did.
    log : str
        What it and vLLM said.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""
    log: str = ""

    @property
    def hung(self) -> bool:
        """Whether ``faulthandler`` ended it, because nothing went on."""
        return "\nTimeout (" in f"\n{self.log}"

    @property
    def end_of_log(self) -> str:
        """As much of the log as one wants to read."""
        return self.log[-4000:]

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that it noted, in one; what was noted last counts."""
        return {name: value for row in self.rows for name, value in row.items()}


class Turns:
    """The processes of some cases, until the scope ends.

    Parameters
    ----------
    module : str
        What each of them runs.
    cases : mapping of str to mapping
        Their environment, beside what vLLM needs: a value for each variable, or None for one
        that is to be unset.
    arguments : sequence of str
        Further arguments of all of them.
    folder : Path
        For what they write.
    """

    def __init__(
        self,
        module: str,
        cases: Mapping[str, Mapping[str, str | None]],
        arguments: Sequence[str],
        folder: Path,
    ) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._processes: dict[str, subprocess.Popen[str]] = {}
        for case, variables in cases.items():
            said = {**os.environ, **ENVIRONMENT, **variables}
            command = [sys.executable, "-m", module, *arguments]
            log = self._stack.enter_context(self._log(case).open("w", encoding="utf-8"))
            self._processes[case] = subprocess.Popen(  # noqa: S603 - runs a module of ours
                [*command, "--work", case, str(self._results(case))],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env={name: value for name, value in said.items() if value is not None},
            )

    def __enter__(self) -> Turns:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            process.kill()
            process.communicate()
        self._stack.close()

    def run(self, case: str, timeout_s: float) -> Found:
        """Give a process its turn, and wait until it has ended or its time is over."""
        process = self._processes[case]
        problem = ""
        try:
            process.communicate("\n", timeout=timeout_s + IMPORTS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            problem = f"no end within {timeout_s + IMPORTS_S:.0f} s"
        log = self._log(case).read_text(encoding="utf-8", errors="replace")
        results = self._results(case)
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
        rows = [json.loads(line) for line in lines]
        if not problem and (process.returncode or not rows):
            last = next(iter(log.strip().splitlines()[-1:]), "no message")
            problem = f"exit code {process.returncode}: {last}"
        return Found(rows, problem, log)

    def _log(self, case: str) -> Path:
        return self._folder / f"{case}.log"

    def _results(self, case: str) -> Path:
        return self._folder / f"{case}.jsonl"


class Notes:
    """Where a process writes what it finds.

    Parameters
    ----------
    path : Path
        The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, **found: Any) -> None:
        """Add a line, which stays whatever happens next."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(found)}\n")


def take_turn() -> None:
    """Import what takes long, and wait until it is this process's turn."""
    import vllm

    _ = vllm.LLM, vllm.SamplingParams  # imported when they are asked for
    sys.stdin.readline()


def leave() -> None:
    """End this process at once: what a shutdown of vLLM would do is no part of what is seen."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
