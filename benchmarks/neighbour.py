"""Another process that holds memory of the GPU, so that this one has no room."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

GIB = 1 << 30

CONTEXT_BYTES = GIB
"""What its context takes at most, about half of that, which is only known once it is there."""

_HOLDER = """
import sys, torch
memory = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("holding", flush=True)
sys.stdin.read()
"""


@contextmanager
def neighbour(leave_bytes: int) -> Iterator[subprocess.Popen[str]]:
    """Have another process hold all device memory but so much; closing its input ends it.

    Raises
    ------
    RuntimeError
        If it does not get the memory.
    """
    import torch

    torch.cuda.synchronize()
    wanted = torch.cuda.mem_get_info()[0] - leave_bytes - CONTEXT_BYTES
    process = subprocess.Popen(  # noqa: S603 - runs the lines above
        [sys.executable, "-c", _HOLDER, str(wanted)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            if process.stdout is None or process.stdout.readline() != "holding\n":
                raise RuntimeError(f"the neighbour does not get {wanted} bytes")
            yield process
        finally:
            process.kill()


def let_go(process: subprocess.Popen[str]) -> None:
    """Have the neighbour exit, and wait until it has.

    Raises
    ------
    RuntimeError
        If it ends badly.
    """
    if process.stdin is not None:
        process.stdin.close()
    if process.wait(60):
        raise RuntimeError(f"the neighbour ended with exit code {process.returncode}")
