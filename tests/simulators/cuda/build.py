"""Compile the simulated driver with the system's C compiler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tests.simulators.compiling import DEFAULT_DIRECTORY, compile_c

Sanitizer = Literal["address", "thread"]
"""A checker that the compiler builds into what it compiles."""

SONAME = "libcuda.so.1"
"""The name under which callers look for the driver."""

SOURCES = Path(__file__).resolve().parent
_PACKAGE_SOURCES = SOURCES.parents[2] / "sleepbackends" / "_native"
"""Where that is of which the simulated kernels are made."""

_INCLUDED = ("fingerprint.h", "packing.c", "packing.h")

_LIBRARY_FLAGS = (
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    f"-Wl,-soname,{SONAME}",
    "-Wl,-z,defs",
)


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
    included = [_PACKAGE_SOURCES / name for name in _INCLUDED]
    headers = [*sorted(SOURCES.glob("*.h")), *included]
    return compile_c(directory, name, sources, [f"-I{_PACKAGE_SOURCES}", *flags], headers)
