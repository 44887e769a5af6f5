"""Options of every backend over a device's virtual memory."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class VmmOptions(BaseModel):
    """Where saved bytes go, how allocations are laid out, and what is checked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tier: Literal["memory", "disk"] = "memory"
    """Where saved bytes are: in pinned host memory, or in unnamed files on a disk, where every
    chunk is checked when it is read. On the way to a disk, or to host memory that the driver does
    not pin, they pass through at most 128 MiB of buffers."""

    disk_directory: Path | None = None
    """Where those files are, created if it is missing; several backends can share it. Without it,
    the first of the system's temporary directory and ``/var/tmp`` that is not kept in memory."""

    host_budget_bytes: int | None = Field(default=None, gt=0)
    """The most host memory to hold for saved bytes, besides the buffers; None leaves it to the
    machine."""

    retention: Literal["retain", "release", "none"] = "retain"
    """What becomes of the memory or the files after a wake-up: kept for the next sleep (fast, and
    what did not change is not saved again), given back in the background, or given back at once.
    Files are given back at once with either."""

    share_copies: bool = False
    """Whether processes of one user keep one copy of equal saved bytes. After a sleep, in the
    background, what was saved moves to files in memory that all of them map; see
    ``docs/fast-sleep.md``. With ``tier="memory"`` and ``retention="retain"`` only."""

    share_directory: Path | None = None
    """Where the directory ``sleepbackends-<uid>`` with those files is; ``/dev/shm`` by default."""

    share_below_bytes: int = Field(default=64 << 20, ge=0)
    """Allocations of one tag that are smaller share physical memory, which makes waking up
    faster (torch asks for 2 MiB at a time); 0 gives each allocation its own."""

    packing: Literal["auto", "off"] = "auto"
    """Whether what packs well, as weights do, is packed by the device on its way to the host and
    unpacked on its way back: fewer bytes cross the link and are saved. Where the device cannot, and
    for what does not shrink by a tenth, bytes are copied as they are; see ``docs/packing.md``."""

    verify: Literal["off", "sample", "resume"] = "off"
    """What a resume checks of the bytes it restored, by their fingerprints: nothing, one
    chunk of 32 MiB in 16 and at least one of each block, or everything. Where the device
    cannot compute fingerprints, everything that is checked is read back."""

    @model_validator(mode="after")
    def _has_a_use_for_everything(self) -> VmmOptions:
        if self.tier == "memory" and self.disk_directory is not None:
            raise ValueError("disk_directory is used with tier='disk' only")
        if self.tier == "disk" and self.host_budget_bytes is not None:
            raise ValueError("host_budget_bytes is used with tier='memory' only")
        if self.share_copies and (self.tier, self.retention) != ("memory", "retain"):
            raise ValueError("share_copies needs tier='memory' and retention='retain'")
        if self.share_directory is not None and not self.share_copies:
            raise ValueError("share_directory is used with share_copies=True only")
        return self
