"""NUMA nodes as the kernel tells of them, and threads that run on one.

Memory comes from the node of the processor that touches it first, unless the process was told
otherwise (https://docs.kernel.org/admin-guide/mm/numa_memory_policy.html). So memory is placed
by where a thread runs: containers commonly forbid ``mbind``, and hardly ever this.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

logger = logging.getLogger(__name__)

SYSFS = Path("/sys")


def nodes() -> dict[int, frozenset[int]]:
    """Return the nodes this thread can place memory on, with their processors it may run on.

    Nodes without memory or without such a processor are left out. Empty where the kernel does
    not tell.
    """
    folder = SYSFS / "devices/system/node"
    allowed = os.sched_getaffinity(0)
    found = {}
    for node in _listed(folder / "has_memory"):
        cpus = allowed & _listed(folder / f"node{node}/cpulist")
        if cpus:
            found[node] = frozenset(cpus)
    return found


def node_of(pci_address: str) -> int | None:
    """Return the node that a device is attached to; None where the kernel does not know.

    Parameters
    ----------
    pci_address : str
        Domain, bus, device and function, in hexadecimal: ``0000:3b:00.0``.
    """
    try:
        node = int((SYSFS / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def run_on(cpus: Collection[int]) -> bool:
    """Have this thread run on these processors only, and tell whether that worked."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        logger.debug("a thread cannot run on processors %s: %s", sorted(cpus), error)
        return False
    return True


def _listed(path: Path) -> set[int]:
    """Read a list of numbers and ranges, such as ``0-3,8``."""
    found: set[int] = set()
    try:
        for part in filter(None, path.read_text().strip().split(",")):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return found
