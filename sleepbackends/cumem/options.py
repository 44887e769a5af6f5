"""Options of the cumem backend."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class CumemOptions(BaseModel):
    """Where saved bytes go, how allocations are laid out, and what is checked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host_budget_bytes: int | None = Field(default=None, gt=0)
    """The most pinned host memory to hold; None leaves it to the machine."""

    retention: Literal["retain", "release", "none"] = "retain"
    """What becomes of pinned memory after a wake-up: kept for the next sleep (fast), given
    back in the background, or given back at once."""

    share_below_bytes: int = Field(default=64 << 20, ge=0)
    """Allocations of one tag that are smaller share physical memory, which makes waking up
    faster (torch asks for 2 MiB at a time); 0 gives each allocation its own."""

    verify: Literal["off", "resume"] = "off"
    """Whether a resume checks what was saved against a checksum made at the suspend, and
    what it restored by reading it back. Slow: for finding faulty memory."""
