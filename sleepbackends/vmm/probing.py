"""Ask a device driver in a process of its own, so that it is not initialised in this one.

That cannot be undone, and what is forked from the process afterwards cannot use the device any
more, although engines fork their workers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

from sleepbackends.availability import Availability
from sleepbackends.errors import SleepBackendsError
from sleepbackends.interpreter import python_command

TIMEOUT_S = 60.0
"""A driver that has to wake devices up takes seconds for each, a hung one takes for ever."""


def ask_elsewhere(module: str, driver: str, tool: str) -> Availability:
    """Run a module that asks a driver, and return its answer; never raises.

    Parameters
    ----------
    module : str
        The module; run, it calls ``answer_whoever_asked``.
    driver : str
        What people call the driver.
    tool : str
        What else would ask it.
    """
    try:
        done = subprocess.run(  # noqa: S603 - runs a module of ours
            python_command(module),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except SleepBackendsError as error:
        return Availability(False, f"the {driver} was not asked: {error.message}", error.hint)
    except subprocess.TimeoutExpired:
        return Availability(
            False,
            f"the {driver} did not answer within {TIMEOUT_S:g} s",
            f"see whether {tool} answers; a driver that hangs needs a restart",
        )
    except (OSError, ValueError) as error:
        return Availability(
            False,
            f"the {driver} was not asked: no process could be started: {error}",
            f"see that {sys.executable} is a Python and that this process may start others",
        )
    # Whatever runs when Python starts may write there too, and so may the driver.
    for line in reversed(_lines(done.stdout)):
        if module in line:
            try:
                return Availability(**json.loads(line)[module])
            except (ValueError, TypeError, LookupError):
                break
    said = (_lines(done.stderr) or _lines(done.stdout) or ["nothing"])[-1]
    return Availability(
        False,
        f"the process that was to ask the {driver} ended with exit code {done.returncode} "
        f"and no answer, but said: {said}",
        f"see what this prints: {sys.executable} -m {module}",
    )


def answer_whoever_asked(module: str, answer: Availability) -> None:
    """Write the answer to standard output, as a line of JSON."""
    sys.stdout.write(f"\n{json.dumps({module: asdict(answer)})}\n")


def _lines(output: bytes) -> list[str]:
    return [line for line in output.decode(errors="replace").splitlines() if line.strip()]
