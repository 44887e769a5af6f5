"""Build the native libraries with the system C compiler, where there is one.

They are plain C without headers of Python, torch or a driver. Without a compiler, or where one
does not build, the package is complete but for the backends that need it; their probes say
so.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("sleepbackends/_native")
FLAGS = ["-std=c11", "-fPIC", "-shared"]


class Native(NamedTuple):
    """A library, and what it is compiled from with which flags."""

    sources: tuple[str, ...]
    library: str
    flags: tuple[str, ...]
    links: tuple[str, ...] = ()


ADDRESS_SPACE_FLAGS = ("-D_GNU_SOURCE", "-O2", "-pthread")
NATIVE = [
    *(
        Native(
            ("address_space.c", f"driver_{driver}.c"),
            f"libsleepbackends_{driver}.so",
            ADDRESS_SPACE_FLAGS,
            ("-ldl",),
        )
        for driver in ("cuda", "level_zero")
    ),
    Native(("fingerprint.c", "packing.c", "touch.c"), "libsleepbackends_host.so", ("-O3",)),
]


class NativeBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Compiles the C files and marks the wheel as being for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the libraries before the files are collected."""
        if self.target_name != "wheel" or platform.system() != "Linux":
            return
        compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
        if compiler is None:
            self.app.display_warning("no C compiler: built without the native libraries")
            return
        for native in NATIVE:
            if not self._compile(compiler, native):
                continue
            build_data["artifacts"].append((FOLDER / native.library).as_posix())
            build_data["pure_python"] = False
            tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{tag}"

    def _compile(self, compiler: str, native: Native) -> bool:
        folder = Path(self.root) / FOLDER
        target = str(folder / native.library)
        sources = [str(folder / source) for source in native.sources]
        command = [compiler, *FLAGS, *native.flags, "-o", target, *sources, *native.links]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            self.app.display_warning(f"built without {native.library}:\n{done.stderr}")
        return not done.returncode
