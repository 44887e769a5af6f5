"""What a probe answers: whether a backend can work on this machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Availability:
    """Whether a backend is usable here, and if not, why and what would help.

    Parameters
    ----------
    ok : bool
        Whether the backend can be created on this machine now.
    reason : str
        One sentence: what was found (``ok``) or what is missing (not ``ok``).
    hint : str
        What to do about it; empty where nothing helps or nothing is wrong.
    """

    ok: bool
    reason: str = ""
    hint: str = ""

    def __bool__(self) -> bool:
        return self.ok
