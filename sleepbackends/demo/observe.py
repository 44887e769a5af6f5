"""What can be seen of an engine and its process without asking the backend."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch
import xxhash
from torch import Tensor


def process_memory() -> int:
    """Measure the resident set of this process, in bytes, from the kernel's page tables.

    The unique set would change with other processes that map the same libraries, and the
    quick counter of the resident set is off by some pages for each processor. The kernel's own
    sum is asked for: listing all mappings takes memory, megabytes where there are many.
    """
    try:
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except OSError:  # not every sandbox has it
        return sum(mapping.rss for mapping in psutil.Process().memory_maps())
    return 1024 * int(re.findall(r"^Rss:\s+(\d+) kB$", text, flags=re.MULTILINE)[0])


def device_memory() -> int:
    """Measure what is in use of the current CUDA device, in bytes, by anybody.

    What torch keeps for itself is given back first.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes


def checksum(tensors: Iterable[Tensor]) -> str:
    """Return one 128-bit hash over the bytes of all tensors, in their order."""
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """List where the tensors are."""
    return [tensor.data_ptr() for tensor in tensors]
