"""``sleepbackends doctor``: what this machine offers, and what to change about it."""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

import psutil

from sleepbackends.cli.output import format_bytes, json_option, write_json
from sleepbackends.cli.terminal import Cell, say_table
from sleepbackends.config import SleepConfig, load_config
from sleepbackends.errors import ConfigurationError, SleepBackendsError
from sleepbackends.host_limits import host_memory, memlock_limit_bytes
from sleepbackends.registry import Registry
from sleepbackends.selection import select

_INTEL = "0x8086"


class Level(str, Enum):
    """How much a finding matters."""

    OK = "ok"
    INFO = "info"
    """Something is absent that only some backends need."""
    WARN = "warn"
    """Something is in the way, or will be slow."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Parameters
    ----------
    topic : str
        What was looked at.
    level : Level
        How much it matters.
    found : str
        What was found.
    change : str
        What to change; empty where nothing needs to be.
    """

    topic: str
    level: Level
    found: str
    change: str = ""


_STYLES = {Level.OK: "green", Level.INFO: "cyan", Level.WARN: "yellow"}


@json_option
def examine_machine(as_json: bool) -> None:
    """Look at what this machine offers and say what to change."""
    findings = list(examine(Registry.load()))
    if as_json:
        write_json({"findings": [{**asdict(f), "level": f.level.value} for f in findings]})
        return
    rows: list[list[Cell]] = []
    for finding in findings:
        level = (finding.level.value, _STYLES[finding.level])
        rows.append([level, finding.topic, finding.found])
        if finding.change:
            rows.append(["", "", (finding.change, "dim")])
    say_table(rows, ("", "what", "found"))


def examine(registry: Registry, root: Path = Path("/")) -> Iterator[Finding]:
    """Look at everything; never raises because of what it finds.

    Parameters
    ----------
    registry : Registry
        The backends to look at.
    root : Path
        Where ``proc``, ``sys`` and ``dev`` are looked for.
    """
    implementation = platform.python_implementation()
    yield Finding("Python", Level.OK, f"{implementation} {platform.python_version()}")
    yield _kernel()
    yield _nvidia(root)
    yield _intel(root)
    yield _memory(root)
    yield _memlock()
    yield _huge_pages(root)
    yield _ptrace(root)
    yield _space("temporary files", Path(tempfile.gettempdir()))
    yield from _configuration(registry)
    yield from _backends(registry)


def _kernel() -> Finding:
    found = f"{platform.system()} {platform.release()}"
    if platform.system() == "Linux":
        return Finding("kernel", Level.OK, found)
    return Finding("kernel", Level.WARN, found, "run on Linux; nothing else is supported")


def _nvidia(root: Path) -> Finding:
    nodes = sorted((root / "dev").glob("nvidia[0-9]*"))
    said = _read(root / "proc/driver/nvidia/version")
    version = re.search(r"\b\d+(?:\.\d+)+\b", said)
    driver = f"driver {version[0]}" if version else "a driver of unknown version"
    if not nodes and not said:
        return Finding("NVIDIA", Level.INFO, "no device and no driver")
    if not nodes:
        return Finding(
            "NVIDIA",
            Level.WARN,
            f"{driver}, but no device node /dev/nvidia*",
            "give the container its devices, for example with --gpus all",
        )
    return _access("NVIDIA", nodes, f"{len(nodes)} device(s), {driver}")


def _intel(root: Path) -> Finding:
    nodes = [
        node
        for node in sorted((root / "dev/dri").glob("renderD*"))
        if _read(root / "sys/class/drm" / node.name / "device/vendor") == _INTEL
    ]
    if not nodes:
        return Finding("Intel", Level.INFO, "no render node /dev/dri/renderD* of an Intel GPU")
    return _access("Intel", nodes, f"{len(nodes)} render node(s)")


def _access(topic: str, nodes: list[Path], found: str) -> Finding:
    closed = [node.name for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if not closed:
        return Finding(topic, Level.OK, found)
    return Finding(
        topic,
        Level.WARN,
        f"{found}; this user may not open {', '.join(closed)}",
        "add the user to the group that owns the nodes (often 'render' or 'video')",
    )


def _memory(root: Path) -> Finding:
    memory = host_memory(root)
    total = format_bytes(psutil.virtual_memory().total)
    found = f"{format_bytes(memory.available_bytes)} can be taken of {total}"
    if memory.limit_bytes is None:
        return Finding("host memory", Level.OK, f"{found}; no control group limits it")
    found += f"; a control group limits it to {format_bytes(memory.limit_bytes)}"
    if memory.source == "machine":
        return Finding("host memory", Level.OK, found)
    return Finding(
        "host memory",
        Level.INFO,
        found,
        "raise the memory limit of the container or service if offloaded contents do not fit",
    )


def _memlock() -> Finding:
    limit_bytes = memlock_limit_bytes()
    if limit_bytes is None:
        return Finding("locked memory", Level.OK, "no limit")
    return Finding(
        "locked memory",
        Level.INFO,
        f"limited to {format_bytes(limit_bytes)}",
        "raise it (ulimit -l, --ulimit memlock=-1) if host memory cannot be pinned",
    )


def _huge_pages(root: Path) -> Finding:
    said = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    setting = re.search(r"\[(\w+)\]", said)
    if setting is None:
        return Finding("huge pages", Level.INFO, "this kernel does not tell")
    if setting[1] != "never":
        return Finding("huge pages", Level.OK, f"transparent huge pages: {setting[1]}")
    return Finding(
        "huge pages",
        Level.WARN,
        "transparent huge pages: never; host copies are slower to take",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _ptrace(root: Path) -> Finding:
    said = _read(root / "proc/sys/kernel/yama/ptrace_scope")
    if said in ("", "0"):
        return Finding("ptrace", Level.OK, "not restricted by Yama")
    return Finding(
        "ptrace",
        Level.INFO,
        f"Yama ptrace_scope is {said}; a process may not checkpoint one that it did not start",
        "grant CAP_SYS_PTRACE, or set kernel.yama.ptrace_scope=0, to checkpoint processes",
    )


def _space(topic: str, folder: Path) -> Finding:
    try:
        free = format_bytes(psutil.disk_usage(str(folder)).free)
        kind = _file_system(folder)
    except OSError as error:
        advice = "create the folder, or name another"
        return Finding(topic, Level.WARN, f"{folder}: {error.strerror}", advice)
    found = f"{folder}: {free} free" + (f" on {kind}" if kind else "")
    if kind in ("tmpfs", "ramfs"):
        return Finding(
            topic,
            Level.WARN,
            f"{found}; files there take host memory",
            "spool to a folder on a disk",
        )
    return Finding(topic, Level.OK, found)


def _file_system(folder: Path) -> str:
    """Tell the type of the file system a folder is on; empty if that cannot be told."""
    place = folder.resolve()
    mounts = {
        part.mountpoint: part.fstype
        for part in psutil.disk_partitions(all=True)
        if place.is_relative_to(part.mountpoint)
    }
    return mounts[max(mounts, key=len)] if mounts else ""


def _configuration(registry: Registry) -> Iterator[Finding]:
    try:
        config = load_config()
    except ConfigurationError as error:
        yield Finding("configuration", Level.WARN, error.message, error.hint)
        config = SleepConfig()
    if "spool_directory" in config.options:
        yield _space("spool", Path(str(config.options["spool_directory"])))
    try:
        selection = select(registry, config)
    except SleepBackendsError as error:
        yield Finding("choice", Level.WARN, error.message, error.hint)
    else:
        yield Finding("choice", Level.OK, f"{selection.name}: {selection.reason}")


def _backends(registry: Registry) -> Iterator[Finding]:
    for name in registry.specs:
        available = registry.probe(name)
        level = Level.OK if available else Level.INFO
        found = available.reason or ("usable" if available else "not usable")
        yield Finding(f"backend {name}", level, found, available.hint)
    for failure in registry.failures:
        advice = "repair or uninstall it; SLEEPBACKENDS_DISABLE_PLUGINS leaves it out"
        yield Finding(f"plugin {failure.entry_point}", Level.WARN, str(failure), advice)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
