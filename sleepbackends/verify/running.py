"""Verify a backend: look at it, run the suite in a process of its own, gather what it tells."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import sleepbackends
from sleepbackends.errors import RequestError
from sleepbackends.interpreter import JsonLines, python_command
from sleepbackends.registry import Registry
from sleepbackends.testing.promises import SUITE_VERSION
from sleepbackends.testing.suite import MIXINS
from sleepbackends.verify.request import VerifyRequest
from sleepbackends.verify.results import Outcome, TestCase, TestResult, Verification

POLL_S = 0.1
"""How often it is seen whether there is something new."""

_LAST_WORDS = 4000
"""Characters of what a process wrote before it died that are kept."""

# 0: all passed, 1: some failed; any other means that pytest itself did not come to its end.
_TO_THE_END = (0, 1)


class Watch(Protocol):
    """Follows a verification; called in order, from one thread."""

    def collected(self, cases: Sequence[TestCase]) -> None:
        """Learn which tests will be run."""
        ...

    def begin(self, name: str) -> None:
        """Learn that a test begins."""
        ...

    def result(self, result: TestResult) -> None:
        """Take a result."""
        ...


def verify(request: VerifyRequest, watch: Watch, registry: Registry | None = None) -> Verification:
    """Run the contract suite against an installed backend, if it can work here.

    Parameters
    ----------
    request : VerifyRequest
        What to verify.
    watch : Watch
        Who follows.
    registry : Registry, optional
        Where to look the backend up first; the suite itself uses what is installed.

    Returns
    -------
    verification : Verification
        Everything there is to report. What goes wrong with the backend is in it.

    Raises
    ------
    UnknownBackendError, PluginError, InvalidOptionsError, RequestError
        There is nothing to try, or not in this way.
    """
    unknown = set(request.parts) - {*MIXINS, "own"}
    if unknown:
        raise RequestError(
            f"the suite has no part {', '.join(sorted(unknown))}",
            hint=f"its parts are {', '.join(MIXINS)}, and own",
        )
    registry = registry or Registry.load()
    registered = registry.get(request.backend)
    registry.load_class(request.backend)
    registry.check_options(request.backend, request.options)
    registry.contract_tests(request.backend)
    declared = registry.declared_capabilities(request.backend)
    about = {
        "from": str(registered.source),
        "contract": str(registered.spec.api_version),
        "suite": str(SUITE_VERSION),
        "sleepbackends": sleepbackends.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    available = registry.probe(request.backend)
    run = _Run(watch)
    started = time.monotonic()
    if available:
        run.run(request)
    return Verification(
        backend=request.backend,
        options=request.options,
        availability=available,
        about=about,
        capabilities=declared.supported() if declared else (),
        results=tuple(run.results),
        problem=run.problem,
        seconds=time.monotonic() - started,
    )


class _Run:
    """One process, and what it has told so far."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._running = ""
        self._cases: dict[str, TestCase] = {}
        self._ended: set[str] = set()
        self.results: list[TestResult] = []
        self.problem = ""

    def run(self, request: VerifyRequest) -> None:
        """Run the process to its end, which may be a bad one."""
        with tempfile.TemporaryDirectory(prefix="sleepbackends-verify-") as folder:
            scratch = Path(folder)
            events, words = scratch / "events", scratch / "words"
            events.touch()
            command = python_command(
                "sleepbackends.verify.worker", request.to_json(), str(events), folder
            )
            with events.open(encoding="utf-8") as file, words.open("wb") as last_words:
                lines = JsonLines(file, self._take)
                process = subprocess.Popen(  # noqa: S603 - runs a module beside this one
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=last_words,
                    stderr=subprocess.STDOUT,
                    # Read when hypothesis is imported, before anybody could say it otherwise.
                    env={**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": folder},
                )
                try:
                    in_time = _wait(process, lines, request.test_timeout_s)
                finally:
                    process.kill()
                    process.wait()
                lines.read()
            if not in_time:
                self._end_badly(f"not done after {request.test_timeout_s:g} s", "")
            elif process.returncode not in _TO_THE_END:
                said = words.read_text(encoding="utf-8", errors="replace")
                self._end_badly(_died_of(process.returncode), said[-_LAST_WORDS:])

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "collected":
            cases = [TestCase(**case) for case in event["tests"]]
            self._cases = {case.name: case for case in cases}
            self._watch.collected(cases)
        elif kind == "begin":
            self._running = event["name"]
            self._watch.begin(self._running)
        elif kind == "problem":
            self.problem = event["text"]
        else:
            case = TestCase(event.pop("name"), event.pop("part"), event.pop("promise"))
            self._add(TestResult(case, Outcome(event.pop("outcome")), **event))

    def _add(self, result: TestResult) -> None:
        self._ended.add(result.case.name)
        self.results.append(result)
        self._watch.result(result)

    def _end_badly(self, why: str, said: str) -> None:
        # A test that has passed may still be taken down: what it opened is closed afterwards.
        case = self._cases.get(self._running)
        if case is not None:
            self._add(TestResult(case, Outcome.FAILED, message=why, details=said))
        missing = len(self._cases.keys() - self._ended)
        left = f"; {missing} tests were not run" if missing else ""
        self.problem = f"{why}{left}" + (f"\n{self.problem or said}" if case is None else "")


def _wait(process: subprocess.Popen[bytes], lines: JsonLines, quiet_s: float) -> bool:
    """Wait for the end; tell whether something came at least every so many seconds."""
    deadline = time.monotonic() + quiet_s
    while time.monotonic() < deadline:
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if lines.read():
                deadline = time.monotonic() + quiet_s
        else:
            return True
    return False


def _died_of(returncode: int) -> str:
    if returncode < 0:
        return f"the process died of {signal.Signals(-returncode).name}"
    return f"the process ended with exit code {returncode}"
