"""Compile the native libraries, or a program that exercises one."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import sleepbackends
from tests.simulators.cuda import find_compiler

FOLDER = Path(sleepbackends.__file__).parent / "_native"
SOURCES = {
    driver: [FOLDER / "address_space.c", FOLDER / f"driver_{driver}.c"]
    for driver in ("cuda", "level_zero")
}
"""Of the libraries with an address space, by driver."""
LIBRARY = "libsleepbackends_cuda.so"
LEVEL_ZERO_LIBRARY = "libsleepbackends_level_zero.so"
HOST_SOURCES = [FOLDER / f"{name}.c" for name in ("fingerprint", "packing", "touch")]
HOST_LIBRARY = "libsleepbackends_host.so"
STRICT = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-pedantic", "-Werror"]
LIBRARY_FLAGS = ["-O2", "-fPIC", "-shared"]


def compile_native(
    output: Path,
    flags: Sequence[str],
    *more_sources: Path,
    sources: Sequence[Path] = SOURCES["cuda"],
) -> Path:
    """Compile the sources of an address space, with others, into a file."""
    flags = ["-D_GNU_SOURCE", "-pthread", f"-I{FOLDER}", *flags]
    return _compile(output, flags, *sources, *more_sources)


def compile_host(output: Path, *flags: str) -> Path:
    """Compile the library of the fingerprint, of packing and of the first touch into a file."""
    return _compile(output, ["-O3", "-fPIC", "-shared", *flags], *HOST_SOURCES)


def compile_kernels(output: Path, name: str) -> Path:
    """Compile kernels for the host, as ``<name>_on_host.cpp`` says, into a library.

    Raises
    ------
    FileNotFoundError
        If there is no C++ compiler.
    """
    folders = [FOLDER, FOLDER.parent / "cumem" / "kernels"]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command = ["c++", *flags, "-fPIC", "-shared", *(f"-I{folder}" for folder in folders)]
    done = subprocess.run(
        [*command, "-o", str(output), str(Path(__file__).with_name(f"{name}_on_host.cpp"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return output


def _compile(output: Path, flags: Sequence[str], *sources: Path) -> Path:
    compiler = find_compiler()
    assert compiler is not None
    command = [compiler, "-std=c11", *STRICT, *flags, "-o", str(output), *map(str, sources), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output
