from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from click.testing import CliRunner

from sleepbackends.availability import Availability
from sleepbackends.cli import app, doctor
from sleepbackends.cli.doctor import Finding, Level, examine
from sleepbackends.hookspecs import BackendSpec
from sleepbackends.host_limits import HostMemory
from sleepbackends.plugins import (
    FailureKind,
    LoadedPlugins,
    PluginFailure,
    RegisteredBackend,
    Source,
)
from sleepbackends.registry import Registry

pytestmark = pytest.mark.usefixtures("either_way")

NVIDIA_VERSION = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build
GCC version:  gcc version 12.2.0
"""

Put = Callable[..., None]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    def put(path: str, text: str = "") -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return put


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SLEEPBACKENDS_"):
            monkeypatch.delenv(name)


def offering(**answers: Availability) -> Registry:
    """Build a registry whose backends give these answers, with one broken plugin."""
    backends = {
        name: RegisteredBackend(
            BackendSpec(name, "tp_absent:X", 1, auto_priority=rank), Source("tp")
        )
        for rank, name in enumerate(answers)
    }
    failure = PluginFailure(Source("tp-bad"), "bad", "no lib", FailureKind.IMPORT)

    class Answering(Registry):
        def probe(self, name: str) -> Availability:
            return answers[name]

    return Answering(LoadedPlugins(backends, [failure]))


def findings(root: Path, registry: Registry | None = None) -> dict[str, Finding]:
    return {f.topic: f for f in examine(registry or offering(), root)}


def test_a_bare_machine_raises_nothing_and_warns_of_nothing_optional(tmp_path: Path) -> None:
    found = findings(tmp_path)
    assert found["NVIDIA"].level is Level.INFO
    assert found["Intel"].level is Level.INFO
    assert found["huge pages"].level is Level.INFO
    assert found["ptrace"].level is Level.OK
    assert found["Python"].found.split()[1].startswith("3.")


def test_nvidia_with_driver_and_nodes(tmp_path: Path, put: Put) -> None:
    put("proc/driver/nvidia/version", NVIDIA_VERSION)
    for node in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        put(f"dev/{node}")
    found = findings(tmp_path)["NVIDIA"]
    assert (found.level, found.found) == (Level.OK, "2 device(s), driver 570.124.06")


def test_nvidia_driver_without_nodes(tmp_path: Path, put: Put) -> None:
    put("proc/driver/nvidia/version", NVIDIA_VERSION)
    found = findings(tmp_path)["NVIDIA"]
    assert found.level is Level.WARN
    assert "container" in found.change


def test_nodes_that_may_not_be_opened(
    tmp_path: Path, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("dev/nvidia0")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = findings(tmp_path)["NVIDIA"]
    assert found.level is Level.WARN
    assert "unknown version" in found.found
    assert "may not open nvidia0" in found.found


def test_intel_nodes_are_told_from_others(tmp_path: Path, put: Put) -> None:
    for node, vendor in (("renderD128", "0x8086\n"), ("renderD129", "0x1002\n")):
        put(f"dev/dri/{node}")
        put(f"sys/class/drm/{node}/device/vendor", vendor)
    found = findings(tmp_path)["Intel"]
    assert (found.level, found.found) == (Level.OK, "1 render node(s)")


@pytest.mark.parametrize(
    ("memory", "level", "part"),
    [
        (HostMemory(2 << 30, None, "machine"), Level.OK, "no control group"),
        (HostMemory(2 << 30, 4 << 30, "machine"), Level.OK, "limits it to 4.0 GiB"),
        (HostMemory(2 << 30, 4 << 30, "/cg"), Level.INFO, "limits it to 4.0 GiB"),
    ],
)
def test_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory: HostMemory,
    level: Level,
    part: str,
) -> None:
    monkeypatch.setattr(doctor, "host_memory", lambda root: memory)
    found = findings(tmp_path)["host memory"]
    assert found.level is level
    assert part in found.found
    assert found.found.startswith("2.0 GiB can be taken of ")
    assert bool(found.change) == (level is Level.INFO)


@pytest.mark.parametrize(
    ("limit", "level", "part"),
    [(None, Level.OK, "no limit"), (8 << 20, Level.INFO, "8.0 MiB")],
)
def test_locked_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
    level: Level,
    part: str,
) -> None:
    monkeypatch.setattr(doctor, "memlock_limit_bytes", lambda: limit)
    found = findings(tmp_path)["locked memory"]
    assert (found.level, part in found.found) == (level, True)


@pytest.mark.parametrize(
    ("text", "level"),
    [("always [madvise] never\n", Level.OK), ("always madvise [never]\n", Level.WARN)],
)
def test_huge_pages(tmp_path: Path, put: Put, text: str, level: Level) -> None:
    put("sys/kernel/mm/transparent_hugepage/enabled", text)
    found = findings(tmp_path)["huge pages"]
    assert (found.level, bool(found.change)) == (level, level is Level.WARN)


@pytest.mark.parametrize(("scope", "level"), [("0", Level.OK), ("1", Level.INFO)])
def test_ptrace(tmp_path: Path, put: Put, scope: str, level: Level) -> None:
    put("proc/sys/kernel/yama/ptrace_scope", f"{scope}\n")
    assert findings(tmp_path)["ptrace"].level is level


@pytest.mark.parametrize(("kind", "level"), [("ext4", Level.OK), ("tmpfs", Level.WARN)])
def test_spool_folder_and_what_it_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, level: Level
) -> None:
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="xfs"),
        SimpleNamespace(mountpoint=str(tmp_path), fstype=kind),
        SimpleNamespace(mountpoint=f"{tmp_path}x", fstype="other"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounts)
    monkeypatch.setenv("SLEEPBACKENDS_OPTIONS__SPOOL_DIRECTORY", str(tmp_path))
    found = findings(tmp_path)["spool"]
    assert found.level is level
    assert f"free on {kind}" in found.found
    assert str(tmp_path) in found.found


def test_missing_spool_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLEEPBACKENDS_OPTIONS__SPOOL_DIRECTORY", str(tmp_path / "absent"))
    found = findings(tmp_path)["spool"]
    assert (found.level, "No such file" in found.found) == (Level.WARN, True)


def test_wrong_configuration_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLEEPBACKENDS_TIMEOUT_S", "soon")
    found = findings(tmp_path)["configuration"]
    assert (found.level, "timeout_s" in found.found) == (Level.WARN, True)


def test_backends_and_the_choice(tmp_path: Path) -> None:
    registry = offering(
        low=Availability(True, "all there"), high=Availability(False, "no device", "plug one in")
    )
    found = findings(tmp_path, registry)
    assert found["backend low"] == Finding("backend low", Level.OK, "all there")
    assert found["backend high"].level is Level.INFO
    assert found["backend high"].change == "plug one in"
    assert (found["choice"].level, found["choice"].found[:4]) == (Level.OK, "low:")
    assert (found["plugin bad"].level, "no lib" in found["plugin bad"].found) == (
        Level.WARN,
        True,
    )


def test_no_usable_backend_is_a_warning(tmp_path: Path) -> None:
    found = findings(tmp_path, offering(high=Availability(False, "no device")))
    assert (found["choice"].level, "no device" in found["choice"].found) == (Level.WARN, True)


def test_command_writes_json_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "load", lambda: offering(low=Availability(True, "[all] there")))
    monkeypatch.setenv("COLUMNS", "200")
    told = CliRunner().invoke(app, ["doctor", "--json"])
    assert told.exit_code == 0
    (low,) = [f for f in json.loads(told.stdout)["findings"] if f["topic"] == "backend low"]
    assert low == {"topic": "backend low", "level": "ok", "found": "[all] there", "change": ""}
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0
    assert "[all] there" in shown.stdout
    assert "SLEEPBACKENDS_DISABLE_PLUGINS" in shown.stdout
