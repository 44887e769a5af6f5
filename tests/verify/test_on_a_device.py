"""``sleepbackends verify`` on simulated devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulators import cuda, level_zero

from .as_a_user import promises_not_tried

Environment = Callable[[], dict[str, str]]


@pytest.mark.parametrize(
    ("backend", "environment", "not_tried"),
    [
        ("cumem", lambda: cuda.environment(cuda.build().parent), []),
        # Fingerprints are torch's there, which has no such device here.
        ("xpu", level_zero.environment, ["staging"]),
    ],
)
def test_promises_are_tried(
    backend: str, environment: Environment, not_tried: list[str], tmp_path: Path
) -> None:
    assert promises_not_tried(backend, 3, tmp_path, environment()) == not_tried
