"""What is done beside an engine leaves the graphs alone that it captures meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.options import CumemOptions

from .helpers import GIB, MIB, holds, pattern


class Capturing:
    """A capture in torch's default mode, which calls of other threads can end."""

    def __init__(self) -> None:
        self._given = torch.arange(1000.0, device="cuda")
        self._graph = torch.cuda.CUDAGraph()
        self._capture = torch.cuda.graph(self._graph)

    def __enter__(self) -> None:
        self._capture.__enter__()
        self._between = self._given + 1

    def __exit__(self, *error: object) -> None:
        self._found = self._between * 2
        self._capture.__exit__(*error)

    def check(self) -> None:
        """Replay what was captured."""
        self._given.fill_(20.0)
        self._graph.replay()
        torch.cuda.synchronize()
        assert self._found.eq(42.0).all()


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_staging(tier: str, tmp_path: Path) -> None:
    backend = CumemBackend(
        CumemOptions.model_validate({"tier": tier, "disk_directory": tmp_path})
        if tier == "disk"
        else None
    )
    with backend.region("weights"):
        tensor = pattern(GIB, 1)
    capturing = Capturing()
    with capturing:
        report = backend.stage(limit_gib_s=1000.0).wait(120)
    assert report.copied_bytes == GIB
    capturing.check()
    slept = backend.suspend(1)
    assert (slept.clean_bytes, slept.copied_bytes) == (GIB, 0)
    backend.resume()
    assert holds(tensor, 1)
    del tensor
    backend.close()


def test_getting_ready_and_trimming() -> None:
    capturing = Capturing()
    with capturing:
        backend = CumemBackend()
        address = backend.allocate("weights", 64 * MIB)
        backend._warm_up.close()
    capturing.check()
    backend.suspend(1)
    backend.resume()
    capturing = Capturing()
    with capturing:
        assert backend.trim() > 0
    capturing.check()
    backend.free(address)
    backend.close()
