"""What can be seen of an engine and its process without asking the backend."""

from __future__ import annotations

from collections.abc import Iterable

import psutil
import torch
import xxhash
from torch import Tensor

from sleepbackends.hostmemory.rollup import rollup_bytes


def process_memory() -> int:
    """Measure the resident set of this process, in bytes, from the kernel's page tables.

    The unique set would change with other processes that map the same libraries, and the
    quick counter of the resident set is off by some pages for each processor. The kernel's own
    sum is asked for: listing all mappings takes memory, megabytes where there are many.
    """
    try:
        return rollup_bytes("Rss")
    except OSError:
        return sum(mapping.rss for mapping in psutil.Process().memory_maps())


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
