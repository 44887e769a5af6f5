from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sleepbackends.cumem.backend import CumemBackend

from .helpers import drop_caches, free_device_bytes


def obstacle() -> str:
    """Why these tests cannot run here, or nothing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        driver = None
    if driver is not None and hasattr(driver, "sim_reset"):
        return "the simulated driver is loaded; run these alone: python -m pytest tests/gpu"
    found = CumemBackend.probe()
    if not found.ok:
        return f"{found.reason} ({found.hint})"
    import torch

    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    why = obstacle() if ours else ""
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if why:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session", autouse=True)
def warm_device() -> None:
    """Have the libraries take what they keep: the first region would, while a test measures."""
    if not obstacle():
        import torch

        one = torch.ones((1, 1), device="cuda")
        torch.mm(one, one)


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    # Other tests measure what is free, so nothing may be left for the collector.
    drop_caches()
    yield
    drop_caches()


@pytest.fixture
def backend() -> Iterator[CumemBackend]:
    backend = CumemBackend()
    yield backend
    backend.close()


@pytest.fixture
def heavy_bytes() -> int:
    """How big a large tensor may be here: a sixteenth of what is free, 4 GiB at most."""
    return min(4 << 30, free_device_bytes() // 16 >> 21 << 21)
