"""A simulated Level Zero driver, driven through Intel's real loader.

It is a driver in plain C that the loader loads because ``ZE_ENABLE_ALT_DRIVERS`` says so. Device
memory is not where its address says, so that the host cannot touch it, and copies run as late as
they may. Controls beside the driver's interface set devices up, inject faults and report misuse.
It shows which calls are made in which order, and nothing about hardware.
"""

from tests.simulators.level_zero.build import build, build_stand_in
from tests.simulators.level_zero.controls import Simulator
from tests.simulators.level_zero.loading import environment, load

__all__ = ["Simulator", "build", "build_stand_in", "environment", "load"]
