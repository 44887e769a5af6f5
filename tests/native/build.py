"""Compile the native library, or a program that exercises it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import sleepbackends
from tests.simulators.cuda import find_compiler

SOURCE = Path(sleepbackends.__file__).parent / "_native" / "address_space.c"
LIBRARY = "libsleepbackends_cuda.so"
STRICT = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-pedantic", "-Werror"]
LIBRARY_FLAGS = ["-O2", "-fPIC", "-shared"]


def compile_native(output: Path, flags: Sequence[str], *more_sources: Path) -> Path:
    """Compile the library's source, with others, into a file."""
    compiler = find_compiler()
    assert compiler is not None
    command = [compiler, "-std=c11", "-D_GNU_SOURCE", "-pthread", *STRICT, *flags]
    sources = [str(path) for path in (SOURCE, *more_sources)]
    done = subprocess.run(
        [*command, "-o", str(output), *sources, "-ldl"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return output
