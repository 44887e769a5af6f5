"""Build the native library with the system C compiler, where there is one.

It is one C file without headers of Python, torch or CUDA. Without a compiler, or where it
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
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("sleepbackends/_native/address_space.c")
LIBRARY = SOURCE.with_name("libsleepbackends_cuda.so")
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-pthread"]


class NativeBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Compiles the C file and marks the wheel as being for this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library before the files are collected."""
        root = Path(self.root)
        if self.target_name != "wheel" or platform.system() != "Linux":
            return
        compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
        if compiler is None:
            self.app.display_warning("no C compiler: built without the native library")
            return
        command = [compiler, *FLAGS, "-o", str(root / LIBRARY), str(root / SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            self.app.display_warning(f"built without the native library:\n{done.stderr}")
            return
        build_data["artifacts"].append(LIBRARY.as_posix())
        build_data["pure_python"] = False
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{tag}"
