"""The memfd backend: memory of this process, kept in sealed files while it sleeps."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Collection, Iterable, Iterator, Sequence

from sleepbackends import (
    Availability,
    BackendSettings,
    Block,
    Capabilities,
    ContentsLostError,
    Control,
    PolicyConflictError,
    Residency,
    StorageError,
    UnknownTagError,
)
from sleepbackends.hostmemory import driver
from sleepbackends.hostmemory.backend import HostMemoryBackend

from sleepbackends_memfd.options import MemfdOptions
from sleepbackends_memfd.passing import receive, send
from sleepbackends_memfd.sealed import SealedFile


class MemfdBackend(HostMemoryBackend[MemfdOptions]):
    """Keeps sleeping blocks in sealed files in memory, one each, which can be handed over.

    Parameters
    ----------
    options : MemfdOptions, optional
        How bytes are copied.
    settings : BackendSettings, optional
        What is common to all backends.
    """

    name = "memfd"
    api_version = 1
    capabilities = Capabilities(
        supports_selective_release=True,
        supports_selective_resume=True,
        supports_offload=True,
        preserves_addresses=True,
        preserves_communicators=True,
        preserves_compiled_artifacts=True,
        preserves_graphs_with_communicators=True,
        owns_allocations=True,
    )

    def __init__(
        self, options: MemfdOptions | None = None, settings: BackendSettings | None = None
    ) -> None:
        super().__init__(options, settings)
        self._chunk_bytes = (options or MemfdOptions()).chunk_bytes
        self._files: dict[int, SealedFile] = {}

    @classmethod
    def probe(cls) -> Availability:
        """Tell whether this system has sealed files in memory."""
        if hasattr(os, "memfd_create"):
            return Availability(True, "memory of this process, in sealed files while it sleeps")
        return Availability(
            False, f"{platform.system()} has no files in memory", "run on Linux, 3.17 or newer"
        )

    # What this backend has and others have not

    def hand_over(self, connection: socket.socket, tags: Collection[str]) -> int:
        """Give another process the sleeping bytes of some tags; they stay here as well.

        Parameters
        ----------
        connection : socket
            A connected unix socket, at the other end of which ``take_over`` is called.
        tags : collection of str
            Which tags. All of their memory has to be offloaded.

        Returns
        -------
        size_bytes : int
            How much was handed over.

        Raises
        ------
        UnknownTagError
            If there is no such tag; nothing was sent.
        PolicyConflictError
            If memory of a tag is not offloaded; nothing was sent.
        StorageError
            If the other side does not take it. Nothing changed here.
        """
        known = self.state().tags
        unknown = set(tags) - set(known)
        if unknown:
            raise UnknownTagError(
                f"unknown tags {sorted(unknown)}; known tags: {sorted(known)}",
                known=known,
                backend=self.name,
                operation="hand_over",
                tags=unknown,
            )
        files: dict[str, list[SealedFile]] = {}
        for tag in sorted(set(tags)):
            blocks = self.ledger.blocks([tag])
            # A file that is referred to stays open, whatever becomes of its block meanwhile.
            found = [self._files.get(block.address) for block in blocks]
            of_tag = [file for file in found if file is not None]
            if len(of_tag) < len(blocks) or self._is_awake(tag):
                raise PolicyConflictError(
                    f"tag {tag!r} cannot be handed over: not all of it is offloaded",
                    hint="suspend(1) first, and let its policy be 'offload'",
                    backend=self.name,
                    operation="hand_over",
                    tags=[tag],
                )
            files[tag] = of_tag
        send(connection, files)
        return sum(file.size_bytes for of_tag in files.values() for file in of_tag)

    def take_over(self, connection: socket.socket) -> dict[str, list[memoryview]]:
        """Allocate memory with what another process hands over, by tag, resident.

        Parameters
        ----------
        connection : socket
            A connected unix socket, at the other end of which ``hand_over`` is called.

        Returns
        -------
        buffers : dict of str to list of memoryview
            Writable bytes in the order of their allocation there; freed with their last view.

        Raises
        ------
        StorageError
            If what comes is not what ``hand_over`` sends, or somebody could still change it.
        ContentsLostError
            If bytes are not what was saved there.
        HostMemoryError
            If there is no room for them.

        Notes
        -----
        Guarantee: if it raises, nothing is left allocated.
        """
        files = receive(connection)
        every = [file for of_tag in files.values() for file in of_tag]
        for file in every:
            if not file.is_sealed:
                raise StorageError(
                    "what was handed over can still be changed, or is not as long as was said",
                    hint="hand over from a memfd backend, and nothing else",
                    backend=self.name,
                    operation="take_over",
                )
        self.check_room(sum(driver.round_up(file.size_bytes) for file in every))
        return {
            self.open_tag(tag): [self._take(tag, file) for file in of_tag]
            for tag, of_tag in files.items()
        }

    def _take(self, tag: str, file: SealedFile) -> memoryview:
        def write(into: memoryview) -> None:
            if not file.copy_into([into], lambda _: None):
                raise ContentsLostError(
                    f"{file.size_bytes} bytes of tag {tag!r} are not what was handed over",
                    tags=[tag],
                    hint="load them again",
                    backend=self.name,
                    operation="take_over",
                )

        return memoryview(self.allocate(tag, file.size_bytes, write)).cast("B")

    def _is_awake(self, tag: str) -> bool:
        return self.state().tags[tag].residencies != {Residency.OFFLOADED}

    # The mechanism

    def check_room_to_save(self, blocks: Sequence[Block]) -> None:
        """Check that there is room: a block is in memory twice until it is unmapped.

        Raises
        ------
        HostMemoryError
            If there is not.
        """
        if blocks:
            self.check_room(max(driver.round_up(block.size_bytes) for block in blocks))

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        """Copy each block to a file of its own and yield it once that is sealed."""
        for block in blocks:
            self._files[block.address] = SealedFile.of(self._parts(block), control.advance)
            yield block

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        """Copy blocks back from their files and yield each that is what was saved.

        Raises
        ------
        ContentsLostError
            After all blocks were tried, if some are not.
        """
        lost: list[Block] = []
        for block in blocks:
            file = self._files[block.address]
            if file.copy_into(self._parts(block), control.advance):
                yield block
            else:
                lost.append(block)
        if lost:
            tags = {block.tag for block in lost}
            raise ContentsLostError(
                f"the files of {len(lost)} block(s) of tags {sorted(tags)} are damaged",
                addresses={block.address for block in lost},
                tags=tags,
                hint="resume again and reload these tags",
            )

    def forget(self, block: Block) -> None:
        """Let go of the block's file, if it has one."""
        self._files.pop(block.address, None)

    def _parts(self, block: Block) -> Iterator[memoryview]:
        whole = driver.view(block.address, block.size_bytes)
        for start in range(0, block.size_bytes, self._chunk_bytes):
            yield whole[start : start + self._chunk_bytes]
