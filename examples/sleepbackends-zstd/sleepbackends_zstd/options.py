"""The options of the zstd backend."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ZstdOptions(BaseModel):
    """How hard to compress, and what to claim.

    Parameters
    ----------
    level : int
        Compression level of Zstandard, from 1 (fast) to 22 (small).
    chunk_bytes : int
        Bytes compressed at a time: how often progress is told and the deadline looked at.
    selective_resume : bool
        Whether some tags can be resumed while others stay asleep.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: int = Field(default=3, ge=1, le=22)
    chunk_bytes: int = Field(default=8 << 20, ge=1 << 12, le=1 << 28)
    selective_resume: bool = False
