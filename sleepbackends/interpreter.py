"""Start a module of this package in another Python like this one."""

from __future__ import annotations

import sys

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
