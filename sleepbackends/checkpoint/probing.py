"""Whether processes can be checkpointed on this machine, without touching one."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from sleepbackends.availability import Availability
from sleepbackends.checkpoint.device_memory import DeviceMonitor
from sleepbackends.checkpoint.driver import driver_problem
from sleepbackends.errors import SleepBackendsError

_MPS = Path("/tmp/nvidia-mps")  # noqa: S108 - where the driver's control daemon is by default
_FIRST_ON_ARM = (595,)
_GVISOR = "Sun Jan 10 15:06:54 PST 2016"
"""When the kernel that gVisor pretends to be was built."""


def probe() -> Availability:
    """Tell whether this machine can checkpoint processes, and what it needs.

    Never raises, and initialises no driver.
    """
    if platform.system() != "Linux":
        return Availability(False, "processes are checkpointed on Linux only")
    for look in (_sandbox, driver_problem, _sharing):
        if (problem := look()) is not None:
            return problem
    try:
        monitor = DeviceMonitor()
        version, devices = monitor.driver_version(), monitor.devices
        split = monitor.partitioned
    except SleepBackendsError as error:
        return Availability(False, error.message, error.hint)
    text = ".".join(map(str, version))
    if platform.machine() != "x86_64" and version < _FIRST_ON_ARM:
        return Availability(
            False,
            f"driver {text} checkpoints no process on {platform.machine()}",
            "update it to 595 or newer",
        )
    if not devices:
        return Availability(False, "there is no NVIDIA device", "give the container its devices")
    if len(split) == len(devices) or _asks_for_instance():
        return Availability(
            False,
            "the devices are split into instances (MIG), which cannot be checkpointed",
            "use a whole GPU",
        )
    return Availability(True, f"process checkpoint of NVIDIA driver {text} (experimental)")


def _sandbox() -> Availability | None:
    kernel = " ".join(platform.uname()) + _read(Path("/proc/version"))
    if "gvisor" in kernel.lower() or _GVISOR in kernel:
        return Availability(
            False,
            "this container runs in gVisor, which checkpoints by means of its own",
            "use gVisor's own checkpoints, or another container runtime",
        )
    return None


def _sharing() -> Availability | None:
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS)
    if (folder / "control").exists():
        return Availability(
            False,
            f"processes share the devices through MPS ({folder}), and cannot be checkpointed so",
            "stop the control daemon of MPS, or unset CUDA_MPS_PIPE_DIRECTORY",
        )
    return None


def _asks_for_instance() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
