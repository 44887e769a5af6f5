"""The zstd backend: memory of this process, kept compressed in memory while it sleeps."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from sleepbackends import (
    Availability,
    BackendSettings,
    Block,
    Capabilities,
    ContentsLostError,
    Control,
)
from sleepbackends.hostmemory import driver
from sleepbackends.hostmemory.backend import HostMemoryBackend

from sleepbackends_zstd.frames import Frame, Packer, Unpacker, packer_bytes, worst_case_bytes
from sleepbackends_zstd.options import ZstdOptions


class ZstdBackend(HostMemoryBackend[ZstdOptions]):
    """Compresses blocks in chunks and keeps the frames in memory.

    It leaves out selective release, and selective resume unless its option says otherwise,
    to show what an orchestrator does then.

    Parameters
    ----------
    options : ZstdOptions, optional
        How hard to compress, and what to claim.
    settings : BackendSettings, optional
        What is common to all backends.
    """

    name = "zstd"
    capabilities = Capabilities(
        supports_offload=True,
        preserves_addresses=True,
        preserves_communicators=True,
        preserves_compiled_artifacts=True,
        preserves_graphs_with_communicators=True,
        owns_allocations=True,
    )

    def __init__(
        self, options: ZstdOptions | None = None, settings: BackendSettings | None = None
    ) -> None:
        super().__init__(options, settings)
        self._chosen = options or ZstdOptions()
        self.capabilities = replace(
            type(self).capabilities, supports_selective_resume=self._chosen.selective_resume
        )
        self.frames: dict[int, list[Frame]] = {}

    @classmethod
    def probe(cls) -> Availability:
        """Tell whether this is Linux, the only system it is tested on."""
        system = platform.system()
        if system == "Linux":
            return Availability(True, "anonymous memory of this process, compressed in memory")
        return Availability(
            False,
            f"giving memory back by page is tested on Linux only, and this is {system}",
            "run on Linux",
        )

    def check_room_to_save(self, blocks: Sequence[Block]) -> None:
        """Check that no suspend of these blocks runs out of memory, incompressible or not.

        Raises
        ------
        HostMemoryError
            If one could.

        Notes
        -----
        A block is given back before the next one is compressed, so that the largest decides,
        and what frames take beyond what blocks give back. Undoing a suspend takes more, since
        frames stay until their blocks are restored; where that does not fit, blocks stay
        offloaded and the error's report says so.
        """
        if not blocks:
            return
        sizes_bytes = [block.size_bytes for block in blocks]
        beyond_bytes = sum(self._worst_case_bytes(size) - size for size in sizes_bytes)
        chunk_bytes = min(max(sizes_bytes), self._chosen.chunk_bytes)
        working_bytes = packer_bytes(self._chosen.level, chunk_bytes)
        self.check_room(max(sizes_bytes) + beyond_bytes + working_bytes)

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        """Compress blocks chunk by chunk and yield each once all of it is in frames."""
        packer = Packer(self._chosen.level)
        for block in blocks:
            frames = self.frames[block.address] = []
            for chunk in self._chunks(block):
                frames.append(packer.pack(chunk))
                control.advance(len(chunk))
            yield block

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        """Decompress blocks into place and yield each that is what was saved.

        Raises
        ------
        ContentsLostError
            After all blocks were tried, if some are not.
        """
        unpacker = Unpacker()
        lost: list[Block] = []
        for block in blocks:
            intact = True
            for frame, chunk in zip(self.frames[block.address], self._chunks(block), strict=True):
                intact = unpacker.unpack(frame, chunk) and intact
                control.advance(len(chunk))
            if intact:
                yield block
            else:
                lost.append(block)
        if lost:
            tags = {block.tag for block in lost}
            raise ContentsLostError(
                f"the frames of {len(lost)} block(s) of tags {sorted(tags)} are damaged",
                addresses={block.address for block in lost},
                tags=tags,
                hint="resume again and reload these tags",
            )

    def forget(self, block: Block) -> None:
        """Give back the block's frames, if it has any."""
        self.frames.pop(block.address, None)

    def _worst_case_bytes(self, size_bytes: int) -> int:
        return worst_case_bytes(size_bytes, frames=-(-size_bytes // self._chosen.chunk_bytes))

    def _chunks(self, block: Block) -> Iterator[memoryview]:
        whole = driver.view(block.address, block.size_bytes)
        for offset in range(0, block.size_bytes, self._chosen.chunk_bytes):
            yield whole[offset : offset + self._chosen.chunk_bytes]
