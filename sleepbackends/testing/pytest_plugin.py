"""Registers the markers of the shipped tests, so that ``--strict-markers`` accepts them."""

from __future__ import annotations

from typing import Any


def pytest_configure(config: Any) -> None:
    """Register the marker ``gpu``."""
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU; skipped with the probe's reason")
