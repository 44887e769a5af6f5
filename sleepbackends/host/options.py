"""The options of the host backend."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["HostOptions"]


class HostOptions(BaseModel):
    """Where saved bytes go, and how fast.

    Parameters
    ----------
    spool_directory : Path, optional
        The directory of the spool file, created if it is missing; one backend at a time.
        Without it, the first of the system's temporary directory and ``/var/tmp`` that is
        not kept in memory.
    chunk_bytes : int
        Bytes hashed and copied at a time.
    threads : int, optional
        Threads that copy; without it, one for each processor, at most 4.
    drop_page_cache : bool
        Write through to the device and drop the kernel's cached pages, so that the memory
        given back is not taken by the cache. A suspend is then as slow as the device.
    allow_memory_filesystem : bool
        Accept a directory kept in memory (tmpfs), where saving gives nothing back.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    spool_directory: Path | None = None
    chunk_bytes: int = Field(default=8 << 20, ge=1 << 16, le=1 << 30, multiple_of=1 << 16)
    threads: int | None = Field(default=None, ge=1, le=64)
    drop_page_cache: bool = False
    allow_memory_filesystem: bool = False
