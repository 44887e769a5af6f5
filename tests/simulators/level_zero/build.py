"""Compile the simulated driver, and what stands in for torch's C++ libraries."""

from __future__ import annotations

from pathlib import Path

from tests.simulators.compiling import DEFAULT_DIRECTORY, compile_c

SOURCES = Path(__file__).resolve().parent
LIBRARY = "libze_simulated.so"

_FLAGS = ("-fPIC", "-shared", "-fvisibility=hidden")


def build(directory: Path = DEFAULT_DIRECTORY) -> Path:
    """Compile the simulated driver unless that has been done, and return its path.

    Raises
    ------
    RuntimeError
        There is no C compiler, or it fails; the message holds what it printed.
    """
    return compile_c(directory, LIBRARY, sorted(SOURCES.glob("*.c")), _FLAGS, [SOURCES / "sim.h"])


def build_stand_in(name: str, directory: Path = DEFAULT_DIRECTORY) -> Path:
    """Compile what stands in for ``libc10_xpu.so`` or ``libsycl.so.9``; return its path.

    Raises
    ------
    RuntimeError
        There is no C compiler, or it fails; the message holds what it printed.
    """
    source = SOURCES / "torch_stand_in" / f"{name.partition('.')[0]}.c"
    return compile_c(directory, name, [source], [*_FLAGS, f"-Wl,-soname,{name}"])
