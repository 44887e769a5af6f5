"""What is to be verified, and how it crosses to the process that does it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class VerifyRequest:
    """What is to be verified.

    Parameters
    ----------
    backend : str
        The name of an installed backend.
    options : mapping of str to object
        Its options, on top of those its own tests ask for.
    parts : tuple of str
        The parts of the suite to run; all of them if empty.
    sequences : int, optional
        How many random sequences are tried; as many as the suite says by default.
    test_timeout_s : float
        How long one test may take before its process is ended.
    """

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    sequences: int | None = None
    test_timeout_s: float = 300.0

    def to_json(self) -> str:
        """Write it on one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> VerifyRequest:
        """Read what ``to_json`` wrote."""
        values = json.loads(text)
        return cls(**{**values, "parts": tuple(values["parts"])})
