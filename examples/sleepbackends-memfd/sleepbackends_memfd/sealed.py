"""Files in memory that nobody can change any more; the only module that makes them."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterable

import xxhash
from sleepbackends import HostMemoryError

# Values of Linux, for Pythons whose fcntl module has no names for them.
_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_SEALED = 0x1 | 0x2 | 0x4 | 0x8
"""No further seals, no shrinking, no growing, no writing."""


class SealedFile:
    """A sealed file in memory; its storage goes when the last process has let go of it.

    Parameters
    ----------
    fd : int
        The file, owned by this object from now on.
    size_bytes : int
        How much is in it.
    digest : bytes
        Hash of what is in it.
    """

    def __init__(self, fd: int, size_bytes: int, digest: bytes) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.digest = digest
        # Whoever still refers to it, to send it, keeps it open.
        weakref.finalize(self, os.close, fd)

    @classmethod
    def of(cls, parts: Iterable[memoryview], done: Callable[[int], None]) -> SealedFile:
        """Write parts to a new file and seal it.

        Parameters
        ----------
        parts : iterable of memoryview
            What goes into it, in order.
        done : callable
            Is told the size of each part once it is written.

        Raises
        ------
        HostMemoryError
            If there is no memory for it; nothing is left of it.
        Exception
            What ``done`` raises; nothing is left either.
        """
        # Programs that this process executes do not inherit it.
        fd = os.memfd_create("sleepbackends", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            digest, size_bytes = xxhash.xxh3_128(), 0
            for part in parts:
                _write(fd, part)
                digest.update(part)
                size_bytes += len(part)
                done(len(part))
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALED)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, size_bytes, digest.digest())

    @property
    def is_sealed(self) -> bool:
        """Whether nobody can change it, and it is as long as it should be."""
        try:
            seals = fcntl.fcntl(self.fd, _F_GET_SEALS)
        except OSError:  # not a file in memory at all
            return False
        return seals & _SEALED == _SEALED and os.fstat(self.fd).st_size == self.size_bytes

    def copy_into(self, parts: Iterable[memoryview], done: Callable[[int], None]) -> bool:
        """Copy it into parts of memory, in order, and tell whether it is what was written."""
        digest, start = xxhash.xxh3_128(), 0
        with (
            mmap.mmap(self.fd, self.size_bytes, prot=mmap.PROT_READ) as mapped,
            memoryview(mapped) as whole,
        ):
            for part in parts:
                part[:] = whole[start : start + len(part)]
                digest.update(part)
                start += len(part)
                done(len(part))
        return bool(digest.digest() == self.digest)


def _write(fd: int, part: memoryview) -> None:
    while part:
        try:
            written = os.write(fd, part)
        except OSError as error:
            raise HostMemoryError(
                f"no memory for {len(part)} bytes in a file: {error.strerror}",
                needed_bytes=len(part),
                hint="free host memory, or discard a tag instead of keeping its contents",
            ) from error
        part = part[written:]
