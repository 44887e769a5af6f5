"""A made-up sysfs that tells of NUMA nodes and of where devices are attached."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def sysfs(
    root: Path,
    cpus: Mapping[int, str],
    devices: Mapping[str, str] | None = None,
    memory: str | None = "all",
) -> Path:
    """Write it below ``root``: processors by node, what is said of devices, which have memory."""
    folder = root / "sys/devices/system/node"
    folder.mkdir(parents=True)
    if memory is not None:
        (folder / "has_memory").write_text(memory.replace("all", ",".join(map(str, cpus))) + "\n")
    for node, text in cpus.items():
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}/cpulist").write_text(f"{text}\n")
    for address, text in (devices or {}).items():
        device = root / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(text)
    return root / "sys"
