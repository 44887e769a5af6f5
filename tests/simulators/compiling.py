"""Compile what simulates a driver with the system's C compiler, and keep the result."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

DEFAULT_DIRECTORY = Path(__file__).resolve().parents[2] / "build" / "simulators"
"""Where results are kept between runs: a directory that version control ignores."""

_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread")


def find_compiler() -> str | None:
    """Return the path of a C compiler, or None where there is none."""
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return path
    return None


def compile_c(
    directory: Path,
    name: str,
    sources: Sequence[Path],
    flags: Sequence[str],
    headers: Sequence[Path] = (),
) -> Path:
    """Compile sources into a file of this name, alone in its directory, unless that was done.

    Raises
    ------
    RuntimeError
        There is no C compiler, or it fails; the message holds what it printed.
    """
    compiler = find_compiler()
    if compiler is None:
        msg = "no C compiler: none of cc, gcc and clang is on the path"
        raise RuntimeError(msg)
    target = directory / _digest(compiler, sources, flags, headers) / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Other test processes may build the same: each its own file, and the last rename wins.
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        output = Path(scratch) / name
        command = [compiler, *_FLAGS, *flags, "-o", str(output), *map(str, sources)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            msg = f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}"
            raise RuntimeError(msg)
        os.replace(output, target)
    return target


def _digest(
    compiler: str, sources: Sequence[Path], flags: Sequence[str], headers: Sequence[Path]
) -> str:
    digest = hashlib.sha256()
    for part in (compiler, platform.machine(), *_FLAGS, *flags):
        digest.update(part.encode() + b"\0")
    for path in (*headers, *sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
