"""Whether the installed cuda-bindings can be used, without importing them."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from sleepbackends.availability import Availability

BINDINGS = ((12, 9, 1), (13, 0, 2))
"""The oldest release of each major version of cuda-bindings that lets the GIL go."""


def bindings_problem() -> Availability | None:
    """Say what is wrong with the installed cuda-bindings; None if nothing is."""
    install = "pip install 'sleepbackends[cuda]'"
    try:
        text = version("cuda-bindings")
    except PackageNotFoundError:
        return Availability(False, "cuda-bindings is not installed", install)
    numbers = tuple(map(int, re.findall(r"\d+", text)[:3]))
    if numbers >= BINDINGS[-1] or any(old <= numbers < (old[0] + 1,) for old in BINDINGS):
        return None
    wanted = " or ".join(f"{'.'.join(map(str, old))} and newer" for old in BINDINGS)
    return Availability(
        False, f"cuda-bindings {text} holds the GIL in driver calls; {wanted} do not", install
    )
