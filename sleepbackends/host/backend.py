"""The host backend: memory of this process, saved to files on local storage."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import cycle
from typing import TypeVar

from sleepbackends.availability import Availability
from sleepbackends.capabilities import IN_PROCESS
from sleepbackends.control import Control
from sleepbackends.errors import ContentsLostError, StorageFullError
from sleepbackends.host.directory import lock_directory, unlock_directory
from sleepbackends.host.options import HostOptions
from sleepbackends.host.spool import Chunk, Spool
from sleepbackends.hostmemory import driver
from sleepbackends.hostmemory.backend import HostMemoryBackend, usable_cpus
from sleepbackends.hostmemory.directory import choose_directory
from sleepbackends.ledger import Block
from sleepbackends.settings import BackendSettings

__all__ = ["HostBackend"]

ResultT = TypeVar("ResultT")


class HostBackend(HostMemoryBackend[HostOptions]):
    """Keeps blocks in anonymous memory and saves them to unnamed files, one a thread.

    Parameters
    ----------
    options : HostOptions, optional
        Where saved bytes go, and how fast.
    settings : BackendSettings, optional
        What is common to all backends.

    Raises
    ------
    StorageError
        If there is no directory for saved bytes, or another backend uses it.
    """

    name = "host"
    capabilities = IN_PROCESS

    def __init__(
        self, options: HostOptions | None = None, settings: BackendSettings | None = None
    ) -> None:
        super().__init__(options, settings)
        chosen = options or HostOptions()
        self._threads = chosen.threads or min(4, usable_cpus())
        self._chunk_bytes = chosen.chunk_bytes
        self._saved: dict[int, list[Chunk]] = {}
        directory = choose_directory(
            chosen.spool_directory,
            "spool_directory",
            allow_memory=chosen.allow_memory_filesystem,
            allow_hint=", or set allow_memory_filesystem=True",
        )
        # Nobody else means the default directory, and unnamed files do not meet there.
        self._lock_fd = lock_directory(directory) if chosen.spool_directory else None
        self._spools: list[Spool] = []
        try:
            # The kernel lets one thread at a time write to a file.
            for _ in range(self._threads):
                self._spools.append(
                    Spool(directory, chosen.chunk_bytes, drop_page_cache=chosen.drop_page_cache)
                )
        except BaseException:
            self.shut_down()
            raise
        self._turns = cycle(self._spools)

    @classmethod
    def probe(cls) -> Availability:
        """Tell whether this is Linux, the only system it is tested on."""
        system = platform.system()
        if system == "Linux":
            return Availability(True, "anonymous memory of this process, saved to a file")
        return Availability(
            False,
            f"giving memory back by page is tested on Linux only, and this is {system}",
            "run on Linux",
        )

    def check_room_to_save(self, blocks: Sequence[Block]) -> None:
        """Check that the file system has room for the bytes of these blocks.

        Raises
        ------
        StorageFullError
            If it has not.
        """
        needed = sum(driver.round_up(block.size_bytes) for block in blocks)
        available = self._spools[0].available_bytes()
        if needed > available:
            raise StorageFullError(
                f"{needed} bytes are to be saved and {self._spools[0].directory} has room for "
                f"{available}",
                needed_bytes=needed,
                available_bytes=available,
                hint="free space there, choose another spool_directory, or discard a tag",
            )

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        """Write blocks to the spool, chunk by chunk, and yield each once it is all there."""
        for block in blocks:
            self._saved[block.address] = self._allot(block.size_bytes)
        for block, _ in self._each_chunk(_write, blocks, control):
            yield block

    def _allot(self, size_bytes: int) -> list[Chunk]:
        chunks = []
        for offset in range(0, size_bytes, self._chunk_bytes):
            chunk_bytes = min(self._chunk_bytes, size_bytes - offset)
            chunks += next(self._turns).allot(chunk_bytes)
        return chunks

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        """Read blocks back, chunk by chunk, and yield each that is what was saved.

        Raises
        ------
        ContentsLostError
            After all blocks were read, if some are not.
        """
        lost: list[Block] = []
        for block, intact in self._each_chunk(_read, list(blocks), control):
            if all(intact):
                yield block
            else:
                lost.append(block)
        if lost:
            tags = {block.tag for block in lost}
            raise ContentsLostError(
                f"the saved bytes of {len(lost)} block(s) of tags {sorted(tags)} are damaged "
                f"in the spool in {self._spools[0].directory}",
                addresses={block.address for block in lost},
                tags=tags,
                hint="resume again and reload these tags",
            )

    def forget(self, block: Block) -> None:
        """Give back the block's slots in the spools, if it has any."""
        for chunk in self._saved.pop(block.address, ()):
            chunk.spool.give_back([chunk])

    def shut_down(self) -> None:
        """Close the spools, whose storage goes with them, and unlock their directory."""
        for spool in self._spools:
            spool.close()
        if self._lock_fd is not None:
            unlock_directory(self._lock_fd)
            self._lock_fd = None

    def _each_chunk(
        self,
        do: Callable[[Chunk, memoryview], ResultT],
        blocks: Sequence[Block],
        control: Control,
    ) -> Iterator[tuple[Block, list[ResultT]]]:
        """Do something with every chunk, several at a time; yield results block by block.

        However this ends, no chunk is being worked on afterwards.
        """
        chunks = [chunk for block in blocks for chunk in self._saved[block.address]]
        views = [view for block in blocks for view in self._views(block)]
        with (
            ThreadPoolExecutor(self._threads, thread_name_prefix="sleepbackends-spool") as pool,
            closing(pool.map(do, chunks, views)) as results,  # type: ignore[type-var]
        ):
            for block in blocks:
                done = []
                for chunk in self._saved[block.address]:
                    done.append(next(results))
                    control.advance(chunk.size_bytes)
                yield block, done

    def _views(self, block: Block) -> Iterator[memoryview]:
        whole = driver.view(block.address, block.size_bytes)
        for offset in range(0, block.size_bytes, self._chunk_bytes):
            yield whole[offset : offset + self._chunk_bytes]


def _write(chunk: Chunk, data: memoryview) -> None:
    chunk.spool.write(chunk, data)


def _read(chunk: Chunk, into: memoryview) -> bool:
    return chunk.spool.read(chunk, into)
