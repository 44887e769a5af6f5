"""The contract suite for the memfd backend."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from typing import Any, ClassVar

from sleepbackends.testing import InstalledBackendTests


class MemfdTests(InstalledBackendTests):
    """The suite, with chunks so small that most of its blocks have several."""

    backend_name = "memfd"
    options: ClassVar[Mapping[str, Any]] = {"chunk_bytes": 4096}

    def used_bytes(self, backend: Any) -> int:
        """Count the pages that the kernel has behind the addresses of the blocks.

        What sleeps is in files, and takes memory of the machine all the same.
        """
        pages = 0
        with open("/proc/self/pagemap", "rb") as pagemap:
            for block in backend.ledger.blocks():
                pagemap.seek(block.address // mmap.PAGESIZE * 8)
                entries = pagemap.read(-(-block.size_bytes // mmap.PAGESIZE) * 8)
                # The two upper bits of an entry: the page is present, or swapped out.
                pages += sum(entry >> 62 != 0 for (entry,) in struct.iter_unpack("=Q", entries))
        return pages * mmap.PAGESIZE
