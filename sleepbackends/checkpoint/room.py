"""Whether the host has room for what leaves the devices."""

from __future__ import annotations

from sleepbackends.errors import HostMemoryError
from sleepbackends.host_limits import host_memory

HOST_SHARE = 1.1
"""How much host memory is wanted for a byte on a device."""


def check_host_memory(size_bytes: int) -> None:
    """Check that so many bytes can be moved from devices to the host.

    The driver keeps them in memory of the processes themselves, so the limits of their control
    group count.

    Raises
    ------
    HostMemoryError
        If they cannot.
    """
    needed = round(size_bytes * HOST_SHARE)
    available = host_memory().available_bytes
    if available < needed:
        raise HostMemoryError(
            f"a checkpoint needs {needed} bytes of host memory and {available} are available",
            hint="make room, or put the backend under one that drops memory first: "
            "'cumem+checkpoint'",
            needed_bytes=needed,
            available_bytes=available,
        )
