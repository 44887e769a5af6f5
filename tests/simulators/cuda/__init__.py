"""A simulated CUDA driver, driven through the real ``cuda.bindings``.

It is a ``libcuda.so.1`` in plain C. Device memory is real memory at the address the driver gave
out, and touching an address with nothing mapped there faults. Copies run later, on a thread per
stream. Controls beside the driver's interface count calls, inject faults and report misuse.

In this process::

    simulator = load(build())       # before cuda.bindings loads a driver
    simulator.reset()

In another one: ``subprocess.run(command, env=environment(build().parent))``.
"""

from tests.simulators.compiling import DEFAULT_DIRECTORY, find_compiler
from tests.simulators.cuda.build import Sanitizer, build, build_exerciser
from tests.simulators.cuda.controls import Simulator
from tests.simulators.cuda.loading import environment, load, loaded_or_skip
from tests.simulators.cuda.reports import (
    DeviceUsage,
    HandleReport,
    MappingReport,
    ProcessUsage,
    RangeReport,
)
from tests.simulators.cuda.shared import Mishap, SharedDevices

__all__ = [
    "DEFAULT_DIRECTORY",
    "DeviceUsage",
    "HandleReport",
    "MappingReport",
    "Mishap",
    "ProcessUsage",
    "RangeReport",
    "Sanitizer",
    "SharedDevices",
    "Simulator",
    "build",
    "build_exerciser",
    "environment",
    "find_compiler",
    "load",
    "loaded_or_skip",
]
