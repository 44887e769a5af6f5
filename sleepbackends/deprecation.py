"""How a part of the interface goes away: it warns for at least one minor release first."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

__all__ = ["SleepBackendsDeprecationWarning"]


class SleepBackendsDeprecationWarning(DeprecationWarning):
    """Something of this package is used that a coming release will not have."""


@dataclass(frozen=True)
class Renamed:
    """A public name that has another name now.

    Parameters
    ----------
    to : str
        The name it has now.
    since, removed_in : str
        The release that renamed it, and the one that will not have the old name.
    """

    to: str
    since: str
    removed_in: str


def warn_deprecated(what: str, *, instead: str, removed_in: str, stacklevel: int = 2) -> None:
    """Warn that something will go away.

    Parameters
    ----------
    what : str
        What is used.
    instead : str
        What to do now.
    removed_in : str
        The release that will not have it.
    stacklevel : int
        Whose line is named: 2 is the caller of whoever warns.
    """
    warnings.warn(
        f"{what} is deprecated and will be gone in sleepbackends {removed_in}: {instead}",
        SleepBackendsDeprecationWarning,
        stacklevel=stacklevel + 1,
    )
