"""Start a module of this package in another Python like this one, and read what it tells."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from typing import Any

from sleepbackends.errors import UnsupportedOperationError


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a process of its own.

    The process finds the same modules as this one. With ``python -m`` it would look into the
    working directory first, where anything may lie.

    Parameters
    ----------
    module : str
        Its full name.
    *arguments : str
        What it gets as ``sys.argv[1:]``.

    Raises
    ------
    UnsupportedOperationError
        If this process does not know of a Python to start, as embedded ones may not.
    """
    # The executable of a frozen program is that program.
    if not sys.executable or getattr(sys, "frozen", False):
        raise UnsupportedOperationError(
            f"this process knows no Python that could run {module}: "
            f"sys.executable is {sys.executable!r}",
            hint="set sys.executable to the Python of this installation",
        )
    paths = list(map(str, sys.path))
    code = (
        f"import sys; sys.path[:] = {paths!r}; import runpy; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", code, *arguments]


class JsonLines:
    """Reads a file of JSON lines that another process writes, as far as lines are whole.

    Parameters
    ----------
    file : text file
        Where to read.
    take : callable
        Is given each line's object.
    """

    def __init__(self, file: io.TextIOBase, take: Callable[[dict[str, Any]], None]) -> None:
        self._file = file
        self._take = take
        self._rest = ""

    def read(self) -> int:
        """Take what has come since the last time, and tell how many lines that were."""
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            self._take(json.loads(line))
        return len(lines)
