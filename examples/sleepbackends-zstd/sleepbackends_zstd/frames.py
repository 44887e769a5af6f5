"""Compressed, checked copies of bytes: the only module that calls Zstandard."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import xxhash
import zstandard
from sleepbackends import HostMemoryError


@dataclass(frozen=True)
class Frame:
    """One Zstandard frame and what it must come out as.

    Parameters
    ----------
    compressed : mmap.mmap
        The frame, which carries a checksum of its own.
    digest : bytes
        Hash of the plain bytes: a frame may be whole and yet be the wrong one.
    """

    compressed: mmap.mmap
    digest: bytes


class Packer:
    """Makes frames; holds the working memory of one compressor.

    Parameters
    ----------
    level : int
        Compression level.
    """

    def __init__(self, level: int) -> None:
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)

    def pack(self, plain: memoryview) -> Frame:
        """Compress bytes.

        Raises
        ------
        HostMemoryError
            If there is no memory for the frame.
        """
        try:
            frame = self._compressor.compress(plain)
            # Not in the heap, which may keep what is freed; a mapping goes to the kernel.
            compressed = mmap.mmap(-1, len(frame), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (MemoryError, OSError) as error:
            raise HostMemoryError(
                f"no memory for the frame of {len(plain)} bytes: {error!r}",
                needed_bytes=worst_case_bytes(len(plain)),
                hint="free host memory, or discard a tag instead of keeping its contents",
            ) from error
        compressed.write(frame)
        return Frame(compressed, xxhash.xxh3_128_digest(plain))


class Unpacker:
    """Opens frames; holds the working memory of one decompressor."""

    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor()

    def unpack(self, frame: Frame, plain: memoryview) -> bool:
        """Decompress a frame into place and tell whether it is what was packed.

        If it is not, the place holds nothing of use.
        """
        # As a view: a mapping itself would be read like a file, from its position on.
        with memoryview(frame.compressed) as compressed:
            try:
                # The place has room for the whole frame, so Zstandard writes to it directly.
                with self._decompressor.stream_reader(compressed) as reader:
                    reader.readinto(plain)
            except zstandard.ZstdError:
                return False
        return xxhash.xxh3_128_digest(plain) == frame.digest


def worst_case_bytes(size_bytes: int, frames: int = 1) -> int:
    """Return the most memory that so many bytes can take in so many frames."""
    # The bound that Zstandard documents for bytes that cannot be compressed, and room for
    # what is rounded up to whole pages.
    return size_bytes + (size_bytes >> 8) + frames * 2 * mmap.PAGESIZE


def packer_bytes(level: int, size_bytes: int) -> int:
    """Return the most memory that packing so many bytes takes besides the frame."""
    parameters = zstandard.ZstdCompressionParameters.from_level(level, source_size=size_bytes)
    # Zstandard also sets up stream buffers: a window and a block in, and a block out.
    buffers_bytes = (1 << parameters.window_log) + 3 * zstandard.BLOCKSIZE_MAX
    context_bytes = parameters.estimated_compression_context_size() + buffers_bytes
    return context_bytes + worst_case_bytes(size_bytes)
