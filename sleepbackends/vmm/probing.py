"""Ask a device driver in a process of its own, so that it is not initialised in this one.

That cannot be undone, and what is forked from the process afterwards cannot use the device any
more, although engines fork their workers.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

from sleepbackends.availability import Availability
from sleepbackends.errors import SleepBackendsError
from sleepbackends.interpreter import python_command
from sleepbackends.vmm.accelerator import Accelerator
from sleepbackends.vmm.address_space import library_path

TIMEOUT_S = 60.0
"""A driver that has to wake devices up takes seconds for each, a hung one takes for ever."""


class Asking(NamedTuple):
    """How a driver is asked.

    Parameters
    ----------
    module : str
        What does it; run, it calls ``answer_whoever_asked``.
    driver, library, native : str
        What people call the driver, what it is loaded as, and the native library over it.
    accelerator : Accelerator
        The kind of device.
    tool : str
        What else would ask the driver.
    install_hint : str
        What to do where it is missing.
    """

    module: str
    driver: str
    library: str
    native: str
    accelerator: Accelerator
    tool: str
    install_hint: str


def probe_driver(
    asking: Asking,
    is_initialised: Callable[[ctypes.CDLL], bool],
    ask: Callable[[], Availability],
) -> Availability:
    """Ask in this process where it has initialised the driver already, else in another one.

    Never raises. In a process that was forked from one that had initialised it, the answer is no
    where torch knows of the fork, else that of a fresh process.
    """
    try:
        library_path(asking.native)
    except SleepBackendsError as error:
        return Availability(False, error.message, error.hint)
    try:
        library = ctypes.CDLL(asking.library)
    except OSError as error:
        reason = f"the {asking.driver} cannot be loaded: {error}"
        return Availability(False, reason, asking.install_hint)
    here = is_initialised(library) or is_bad_fork(asking.accelerator)
    return ask() if here else _ask_elsewhere(asking)


def is_bad_fork(accelerator: Accelerator) -> bool:
    """Tell whether torch knows that this process was forked from one that used the devices.

    The drivers themselves answer there as if nobody had initialised them.
    """
    of_kind: Any = getattr(sys.modules.get("torch"), accelerator.kind, None)
    return bool(getattr(of_kind, "_is_in_bad_fork", bool)())


def refusal(error: SleepBackendsError, accelerator: Accelerator) -> Availability:
    """Return the answer that an error of the driver is."""
    forked = is_bad_fork(accelerator)
    hint = "start the process with spawn instead of fork" if forked else error.hint
    return Availability(False, error.message, hint)


def _ask_elsewhere(asking: Asking) -> Availability:
    module, driver = asking.module, asking.driver
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
            f"see whether {asking.tool} answers; a driver that hangs needs a restart",
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
