"""The contract suite over the zstd backend, for both values of ``selective_resume``."""

from __future__ import annotations

import mmap
import struct
from typing import Any, ClassVar

from sleepbackends import BackendSettings
from sleepbackends.testing import BackendContractTests

from sleepbackends_zstd.backend import ZstdBackend
from sleepbackends_zstd.options import ZstdOptions


class TestZstd(BackendContractTests):
    # Chunks so small that most blocks of the suite have several.
    options: ClassVar[ZstdOptions] = ZstdOptions(chunk_bytes=4096)

    def make_backend(self, settings: BackendSettings) -> ZstdBackend:
        return ZstdBackend(self.options, settings)

    def used_bytes(self, backend: Any) -> int:
        """Count the pages that the kernel has behind the addresses of the blocks."""
        pages = 0
        with open("/proc/self/pagemap", "rb") as pagemap:
            for block in backend.ledger.blocks():
                pagemap.seek(block.address // mmap.PAGESIZE * 8)
                entries = pagemap.read(-(-block.size_bytes // mmap.PAGESIZE) * 8)
                # The two upper bits of an entry: the page is present, or swapped out.
                pages += sum(entry >> 62 != 0 for (entry,) in struct.iter_unpack("=Q", entries))
        return pages * mmap.PAGESIZE


class TestZstdWithSelectiveResume(TestZstd):
    options: ClassVar[ZstdOptions] = ZstdOptions(chunk_bytes=4096, selective_resume=True)
