"""Compile the simulated driver with the system's C compiler."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

Sanitizer = Literal["address", "thread"]
"""A checker that the compiler builds into what it compiles."""

SONAME = "libcuda.so.1"
"""The name under which callers look for the driver."""

SOURCES = Path(__file__).resolve().parent
DEFAULT_DIRECTORY = SOURCES.parents[2] / "build" / "simulators"
"""Where results are kept between runs: a directory that version control ignores."""

_PACKAGE_SOURCES = SOURCES.parents[2] / "sleepbackends" / "_native"
"""Where the header of the fingerprint is, which the simulated kernel includes."""

_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread")
_LIBRARY_FLAGS = (
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    f"-Wl,-soname,{SONAME}",
    "-Wl,-z,defs",
)


def find_compiler() -> str | None:
    """Return the path of a C compiler, or None where there is none."""
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return path
    return None


def build(directory: Path = DEFAULT_DIRECTORY, sanitizer: Sanitizer | None = None) -> Path:
    """Compile the simulated driver unless that has been done, and return its path.

    The file is named ``libcuda.so.1`` and is alone in its directory.

    Raises
    ------
    RuntimeError
        There is no C compiler, or it fails; the message holds what it printed.
    """
    flags = (*_LIBRARY_FLAGS, *_sanitizer_flags(sanitizer))
    return _compile(directory, SONAME, sorted(SOURCES.glob("*.c")), flags)


def build_exerciser(
    directory: Path = DEFAULT_DIRECTORY, sanitizer: Sanitizer | None = None
) -> Path:
    """Compile the driver with a program that uses it from many threads; return its path.

    Raises
    ------
    RuntimeError
        There is no C compiler, or it fails; the message holds what it printed.
    """
    sources = [*sorted(SOURCES.glob("*.c")), SOURCES / "exerciser" / "exerciser.c"]
    return _compile(directory, "exerciser", sources, _sanitizer_flags(sanitizer))


def _sanitizer_flags(sanitizer: Sanitizer | None) -> tuple[str, ...]:
    # Less optimised, as that halves the time to compile and hides nothing from the checkers.
    return ("-O1", f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer") if sanitizer else ()


def _compile(directory: Path, name: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    compiler = find_compiler()
    if compiler is None:
        msg = "no C compiler: none of cc, gcc and clang is on the path"
        raise RuntimeError(msg)
    target = directory / _digest(compiler, sources, flags) / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Other test processes may build the same: each its own file, and the last rename wins.
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        output = Path(scratch) / name
        include = f"-I{_PACKAGE_SOURCES}"
        command = [compiler, *_FLAGS, include, *flags, "-o", str(output), *map(str, sources)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            msg = f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}"
            raise RuntimeError(msg)
        os.replace(output, target)
    return target


def _digest(compiler: str, sources: Sequence[Path], flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (compiler, platform.machine(), *_FLAGS, *flags):
        digest.update(part.encode() + b"\0")
    headers = [*sorted(SOURCES.glob("*.h")), _PACKAGE_SOURCES / "fingerprint.h"]
    for path in (*headers, *sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
