"""Measuring devices from a process that may be asleep: another one asks on its behalf.

A process that is checkpointed waits in NVIDIA's management library as it does in the driver, so
that one which asked for itself would wait for its own resume.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from typing import Protocol

from pydantic import ValidationError

from sleepbackends.checkpoint.device_memory import DeviceMemory
from sleepbackends.checkpoint.messages import Measured
from sleepbackends.errors import BackendUnavailableError, SleepBackendsError
from sleepbackends.interpreter import python_command

TIMEOUT_S = 60.0
"""A driver without persistence mode takes seconds for each device."""

_MODULE = "sleepbackends.checkpoint.device_memory"


class Monitor(Protocol):
    """What is asked of a ``DeviceMonitor`` here."""

    def measure(self, devices: Collection[str]) -> dict[str, DeviceMemory]:
        """Measure some devices; those that are not there are left out."""
        ...


class OutsideMonitor:
    """Has a process of its own ask the management library, one for each question.

    It can be asked while this process is asleep.
    """

    def measure(self, devices: Collection[str]) -> dict[str, DeviceMemory]:
        """Measure some devices; those that are not there are left out.

        Raises
        ------
        BackendUnavailableError
            If no process can be started, or the library cannot be used there.
        """
        if not devices:
            return {}
        try:
            done = subprocess.run(  # noqa: S603 - runs a module of this package
                python_command(_MODULE, *devices),
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT_S,
            )
            found = Measured.model_validate_json(_last_line(done.stdout))
        except (OSError, SleepBackendsError, subprocess.TimeoutExpired) as error:
            raise _unmeasured(str(error)) from error
        except ValidationError as error:
            said = _last_line(done.stderr) or f"it said {_last_line(done.stdout)!r}"
            raise _unmeasured(said) from error
        if found.problem:
            raise BackendUnavailableError(found.problem, hint=found.hint)
        return found.devices


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _unmeasured(why: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"the devices could not be measured by another process: {why}",
        hint="see that this process may start others; sleepbackends resume --pid PID measures "
        "and wakes from outside",
    )
