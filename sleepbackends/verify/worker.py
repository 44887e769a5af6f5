"""Run the suite with pytest and tell of each test as it comes; a process of its own.

A backend that brings the process down, or exits, is then a failed test and not a lost report.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO

import pytest

from sleepbackends.termination import end_with_parent
from sleepbackends.testing.promises import BrokenPromise, Promise
from sleepbackends.testing.suite import MIXINS
from sleepbackends.verify.request import VerifyRequest

_MODULE = """
from sleepbackends.verify import suite
from sleepbackends.verify.request import VerifyRequest

TestBackend = suite.tests_of(VerifyRequest.from_json({request!r}))
"""

_MOST_DETAILS = 20_000
"""Characters of a traceback that are kept."""


class Teller:
    """Writes a JSON line for the collected tests, for each that begins, and for each result."""

    def __init__(self, file: TextIO, parts: tuple[str, ...]) -> None:
        self._file = file
        self._parts = parts

    def _tell(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **values}) + "\n")
        self._file.flush()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out the parts that were not asked for, and put the others into their order."""
        order = [*MIXINS, "own"]
        chosen = [item for item in items if not self._parts or _part(item) in self._parts]
        items[:] = sorted(chosen, key=lambda item: order.index(_part(item)))

    def pytest_collection_finish(self, session: Any) -> None:
        """Tell which tests there are."""
        self._tell("collected", tests=[_case(item) for item in session.items])

    def pytest_collectreport(self, report: Any) -> None:
        """Tell why tests could not be collected."""
        if report.failed:
            self._tell("problem", text=str(report.longrepr))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tell which test begins."""
        self._tell("begin", name=nodeid.rpartition("::")[2])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
        """Tell what became of a test, once: at its call, or where it did not come to that."""
        report = yield
        if report.when != "call" and report.passed:
            return report
        if report.when == "teardown" and report.skipped:
            return report
        values: dict[str, Any] = {**_case(item), "outcome": report.outcome}
        error = call.excinfo.value if call.excinfo else None
        if report.failed:
            values["message"], promise = _seen(error)
            values["promise"] = promise or values["promise"]
            values["details"] = str(report.longrepr)[-_MOST_DETAILS:]
            if report.when != "call":
                values["message"] = f"in {report.when}: {values['message']}"
        elif report.skipped:
            values["message"] = str(getattr(error, "msg", None) or error)
        else:
            tried: set[Promise] = getattr(item.instance, "tried_promises", set())
            values["tried"] = [promise.key for promise in Promise if promise in tried]
        self._tell("result", seconds=report.duration, **values)
        return report


def _part(item: Any) -> str:
    owner = item.function.__qualname__.partition(".")[0]
    return next((name for name, part in MIXINS.items() if part.__name__ == owner), "own")


def _case(item: Any) -> dict[str, str]:
    promise: Promise | None = getattr(item.function, "promise", None)
    return {"name": item.name, "part": _part(item), "promise": promise.key if promise else ""}


def _seen(error: BaseException | None) -> tuple[str, str]:
    """Say what was seen, and which promise that broke if it is known."""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, BrokenPromise):
        return error.seen + notes, error.promise.key
    for inner in getattr(error, "exceptions", ()):  # hypothesis found several
        if isinstance(inner, BrokenPromise):
            return _seen(inner)
    return f"{type(error).__name__}: {error}{notes}", ""


def main(request_json: str, events: str, scratch: str) -> int:
    """Run what was asked for; return pytest's exit code.

    Parameters
    ----------
    request_json : str
        The request.
    events : str
        The file to tell of it in.
    scratch : str
        A folder for whatever the tests leave behind.
    """
    request = VerifyRequest.from_json(request_json)
    # Neither plugins nor settings of whoever calls have a say in what is proved.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    folder = Path(scratch)
    settings, module = folder / "pytest.ini", folder / "test_backend.py"
    settings.write_text("[pytest]\n", encoding="utf-8")
    module.write_text(_MODULE.format(request=request.to_json()), encoding="utf-8")
    with Path(events).open("a", encoding="utf-8") as file:
        plugins = ["-p", "sleepbackends.testing.pytest_plugin", "-p", "no:cacheprovider"]
        place = ["-c", str(settings), "--rootdir", scratch]
        code = pytest.main([*plugins, *place, str(module)], [Teller(file, request.parts)])
    return int(code)


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(*sys.argv[1:]))
