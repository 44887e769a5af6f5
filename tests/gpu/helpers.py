"""What the GPU tests share: contents that can be told apart, figures, other processes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Mapping

import torch

from benchmarks.neighbour import let_go as let_go
from benchmarks.neighbour import neighbour as neighbour
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.residency import Residency

MIB = 1 << 20
GIB = 1 << 30

LARGE = 64 * MIB
"""From this size on every allocation has a block of its own."""

SLACK = 48 * MIB
"""What the device's free memory may move by for reasons of the driver's own."""


def pattern(size_bytes: int, seed: int, device: int = 0) -> torch.Tensor:
    """Bytes that depend on their place and on the seed, as int32."""
    count = -(-size_bytes // 4)
    tensor = torch.arange(count, dtype=torch.int32, device=f"cuda:{device}")
    return tensor.mul_(-1640531527).bitwise_xor_(seed * 0x01000193 & 0x7FFFFFFF)


def holds(tensor: torch.Tensor, seed: int) -> bool:
    """Whether a tensor still is what ``pattern`` made, to the last byte."""
    return torch.equal(tensor, pattern(tensor.nbytes, seed, tensor.device.index))


def drop_caches() -> None:
    """Collect garbage and have torch give back what it only keeps for later."""
    gc.collect()
    torch.cuda.empty_cache()


def free_device_bytes(device: int = 0) -> int:
    """What the driver calls free, once everything queued has run."""
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def spin(cycles: int) -> None:
    """Queue a kernel that does nothing for so many clock cycles, about two to a nanosecond."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def tag_of(backend: CumemBackend, tensor: torch.Tensor) -> str | None:
    """Under which tag the backend holds a tensor; None if it does not."""
    backend.state()
    address = tensor.data_ptr()
    for block in backend.ledger.blocks():
        # A block counts the bytes that were asked for; the extent behind it has gaps.
        if block.address <= address < block.address + block.extra.size_bytes:
            return block.tag
    return None


def blocks(backend: CumemBackend, tag: str) -> int:
    """How many blocks a tag has."""
    return backend.state().tags[tag].blocks


def put(backend: CumemBackend, tag: str, residency: Residency) -> None:
    """Bring a tag into a residency, from being resident."""
    if residency is Residency.OFFLOADED:
        backend.suspend(1)
    elif residency is not Residency.RESIDENT:
        backend.discard([tag])
        if residency is Residency.UNDEFINED:
            backend.resume([tag])
    assert backend.state().tags[tag].residencies == {residency}


def run_script(
    code: str,
    *arguments: str,
    timeout_s: float = 120.0,
    env: Mapping[str, str | None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, and see that it ends well and says nothing.

    ``env`` adds variables to this process's, or takes away those that are None.
    """
    variables = {**os.environ, **(env or {})}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={name: value for name, value in variables.items() if value is not None},
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.stderr == "", done.stderr
    return done
